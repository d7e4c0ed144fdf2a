"""The decoder as the decode step wants it: weights as a flat tuple, everything else static and hashable."""

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from marsjax.decoding import cache
from marsjax.models import Decoder, ModelConfig, to_list
from marsjax.models.decoder import Linear


@dataclasses.dataclass(frozen=True)
class DecoderNetwork:
    """A `marsjax.decoding.step.Network` made of a Decoder in the list layout."""

    config: ModelConfig
    graphdef: Any
    treedef: Any
    dtype: Any

    def __hash__(self) -> int:
        # Called at every dispatch; the graph of hundreds of arrays would take longer, and __eq__ looks at it anyway.
        return hash((self.config, self.dtype))

    def empty_cache(self, rows: int, length: int) -> list[cache.LayerCache]:
        c = self.config
        return cache.empty(c.num_layers, rows, c.num_kv_heads, length, c.head_dim, self.dtype)

    def forward(self, params, tokens, positions, attend, layer_caches):
        return self._model(params)(
            tokens, positions=positions, attend=attend, layer_states=layer_caches, dtype=self.dtype
        )

    def unembed(self, params, hidden):
        model = self._model(params)
        if isinstance(model.head, OutputMajorLinear):
            return multiply(hidden, model.head.kernel[...].astype(hidden.dtype), jnp.float32)
        if model.head is None and jax.default_backend() == "cpu":
            return multiply(hidden, model.embed_table.embedding[...].astype(hidden.dtype), jnp.float32)
        return model.unembed(hidden)

    def _model(self, params) -> Decoder:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, params))


def split(
    model: Decoder, dtype: Any = jnp.float32, *, consume: bool = False
) -> tuple[DecoderNetwork, tuple[jax.Array, ...]]:
    """(network, params) of a decoder; stacked layers are taken apart.

    On a CPU the kernels are laid out anew (see `OutputMajorLinear`), elsewhere the arrays are shared with the model.
    `consume` frees the model's own kernels on the way, so that the weights are never in memory twice.
    """
    model = nnx.merge(*nnx.split(to_list(model)))  # other objects, the same arrays: the caller's model stays as it is
    if jax.default_backend() == "cpu":
        _lay_out_for_cpu(model, consume)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return DecoderNetwork(model.config, graphdef, treedef, jnp.dtype(dtype)), tuple(leaves)


class OutputMajorLinear(nnx.Module):
    """A Linear whose kernel lies [out, in]."""

    def __init__(self, linear: Linear, consume: bool):
        old = linear.kernel[...]
        self.kernel = nnx.Param(jax.block_until_ready(old.T))
        self.bias = linear.bias
        if consume:
            old.delete()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = multiply(x, self.kernel[...].astype(x.dtype))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def multiply(x: jax.Array, w: jax.Array, out_dtype: Any = None) -> jax.Array:
    """x [..., in] times w [out, in] → [..., out] in `out_dtype` (None: x's), as XLA's CPU backend does it fastest.

    For 2 to 16 rows that is W xᵀ, where the compiler walks the weights once without packing them: a tenth of a step.
    The barrier keeps it from turning the product back into x Wᵀ.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    y = jax.lax.optimization_barrier(product(w, rows)).T if 2 <= rows.shape[0] <= 16 else product(rows, w)
    return y.reshape(*x.shape[:-1], w.shape[0])


def _lay_out_for_cpu(model: Decoder, consume: bool) -> None:
    for layer in cast(nnx.List, model.layers):
        for block, names in ((layer.attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(block, name, OutputMajorLinear(getattr(block, name), consume))
    if model.head is not None:
        model.head = cast(Any, OutputMajorLinear(model.head, consume))
