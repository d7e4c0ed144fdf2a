"""The decoder as the decode step wants it: weights as a flat tuple, everything else static and hashable."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from marsjax.decoding import cache, cpu
from marsjax.models import Decoder, ModelConfig, to_list


@dataclasses.dataclass(frozen=True)
class DecoderNetwork:
    """A `marsjax.decoding.step.Network` made of a Decoder in the list layout."""

    config: ModelConfig
    graphdef: Any
    treedef: Any
    dtype: Any
    for_cpu: bool

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
        return cpu.unembed(model, hidden) if self.for_cpu else model.unembed(hidden)

    def commit(self, cache_, slots, first, entries, cursor, writes):
        return cache.commit(cache_, slots, first, entries, cursor, writes)

    def write_rows(self, old, new, start, writes):
        return cache.write_rows(old, new, start, writes)

    def state_sharding(self, params, state):
        """With the weights, and whole on each device if those are spread out."""
        sharding = next((p.sharding for p in params if hasattr(p, "sharding")), None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        return sharding

    def _model(self, params) -> Decoder:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, params))


def split(
    model: Decoder, dtype: Any = jnp.float32, *, consume: bool = False, for_cpu: bool | None = None
) -> tuple[DecoderNetwork, tuple[jax.Array, ...]]:
    """(network, params) of a decoder; stacked layers are taken apart.

    Args:
      model: any layout; stays as it is, but for `consume`.
      dtype: compute dtype.
      consume: the model's own kernels may be freed on the way, so that the weights are never in memory twice.
      for_cpu: lay the kernels out anew (`marsjax.decoding.cpu`), else share the model's arrays. None: where they lie on
        a CPU.
    """
    model = nnx.merge(*nnx.split(to_list(model)))  # other objects, the same arrays
    if for_cpu is None:
        for_cpu = _on_one_cpu(model.embed_table.embedding[...])
    if for_cpu:
        cpu.lay_out(model, consume=consume)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return DecoderNetwork(model.config, graphdef, treedef, jnp.dtype(dtype), for_cpu), tuple(leaves)


def _on_one_cpu(array: Any) -> bool:
    devices = array.devices() if isinstance(array, jax.Array) else ()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"
