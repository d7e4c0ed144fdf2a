"""The decoder as the decode step wants it: weights as a flat tuple, everything else static and hashable."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from marsjax.decoding import cache
from marsjax.models import Decoder, ModelConfig, to_list


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
        return self._model(params).unembed(hidden)

    def _model(self, params) -> Decoder:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, params))


def split(model: Decoder, dtype: Any = jnp.float32) -> tuple[DecoderNetwork, tuple[jax.Array, ...]]:
    """(network, params) of a decoder; stacked layers are taken apart. Arrays are shared with the model, not copied."""
    graphdef, state = nnx.split(to_list(model))
    leaves, treedef = jax.tree.flatten(state)
    return DecoderNetwork(model.config, graphdef, treedef, jnp.dtype(dtype)), tuple(leaves)
