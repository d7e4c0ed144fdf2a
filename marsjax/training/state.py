"""What training carries from step to step, and how the network is rebuilt from it inside jit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from marsjax.models import Decoder, ModelConfig
from marsjax.models.layout import from_params, layers_to_list

Params = dict[str, Any]  # nested dict of arrays, layers stacked: the tree of nnx.to_pure_dict


class TrainState(NamedTuple):
    """A pytree, donated to each step."""

    params: Params  # float32 master weights
    opt_state: Any
    step: jax.Array  # int32 scalar: updates done
    key: jax.Array  # typed PRNG key of what objectives draw


def new_state(model: Decoder, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state at step 0 of a decoder with stacked layers. Takes the model's arrays: do not use it afterwards."""
    if model.layout != "stacked":
        raise ValueError("training needs the stacked layout; see marsjax.models.to_stacked")
    params = nnx.to_pure_dict(nnx.state(model))
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.key(seed))


def rebuild(config: ModelConfig, params: Params, *, unroll: bool = False) -> Decoder:
    """The decoder of `params`; works under jit. `unroll` gives the list layout, whose layers are not scanned."""
    if unroll:
        params = {**params, "layers": dict(enumerate(layers_to_list(params["layers"], config.num_layers)))}
    return from_params(config, params, "list" if unroll else "stacked")


def copy_as_list(config: ModelConfig, params: Params, dtype: Any) -> Decoder:
    """A decoder of its own, layers as a list, every array a copy in `dtype`, made one at a time."""
    own = {name: jax.tree.map(lambda x: jnp.array(x, dtype), tree) for name, tree in params.items() if name != "layers"}
    own["layers"] = {
        i: jax.tree.map(lambda x, i=i: jnp.array(x[i], dtype), params["layers"]) for i in range(config.num_layers)
    }
    return from_params(config, own, "list", dtype)
