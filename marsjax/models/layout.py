"""Between the stack of layers that training scans and the list of layers that decoding unrolls."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from marsjax.models.config import ModelConfig
from marsjax.models.decoder import Decoder, Layout


class _OneKey:
    """A random stream for shapes alone: drawing keys from flax's takes most of the time of tracing a decoder."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def abstract(
    config: ModelConfig, layout: Layout = "stacked", param_dtype: Any = jnp.float32
) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, parameters as shapes and dtypes) of a decoder, without allocating it."""
    rngs: Any = _OneKey()
    model = nnx.eval_shape(lambda: Decoder(config, rngs=rngs, layout=layout, param_dtype=param_dtype))
    return nnx.split(model)


def from_params(
    config: ModelConfig, params: dict[str, Any], layout: Layout = "stacked", param_dtype: Any = jnp.float32
) -> Decoder:
    """A decoder that holds `params`, the tree `nnx.to_pure_dict` gives of one in this layout. Works under jit."""
    graphdef, state = abstract(config, layout, param_dtype)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def layers_to_list(stacked: Any, num_layers: int) -> list[Any]:
    """A pytree whose leaves lead with the layer axis → one pytree a layer."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_layers)]


def layers_to_stack(layers: list[Any]) -> Any:
    """Inverse of `layers_to_list`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def to_list(model: Decoder) -> Decoder:
    """The same decoder with its layers one by one; arrays outside the layers are shared, not copied."""
    return _convert(model, "list")


def to_stacked(model: Decoder) -> Decoder:
    """The same decoder with its layers stacked; arrays outside the layers are shared, not copied."""
    return _convert(model, "stacked")


def _convert(model: Decoder, layout: Layout) -> Decoder:
    if model.layout == layout:
        return model
    params = nnx.to_pure_dict(nnx.state(model))
    if layout == "list":
        params["layers"] = dict(enumerate(layers_to_list(params["layers"], model.config.num_layers)))
    else:
        params["layers"] = layers_to_stack([params["layers"][i] for i in range(model.config.num_layers)])
    return from_params(model.config, params, layout)
