"""The decoder as the decode step wants it: weights as a flat tuple, everything else static and hashable."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marsjax.decoding import cache, cpu
from marsjax.models import Decoder, ModelConfig, to_list
from marsjax.models.layers import Gate, Linear
from marsjax.models.layout import abstract as abstract_decoder
from marsjax.parallel.sharding import shardings


@dataclasses.dataclass(frozen=True)
class DecoderNetwork:
    """A `marsjax.decoding.step.Network` made of a Decoder in the list layout."""

    config: ModelConfig
    graphdef: Any
    treedef: Any
    dtype: Any
    for_cpu: bool
    mesh: Mesh | None = None

    def __hash__(self) -> int:
        # Called at every dispatch; the graph of hundreds of arrays would take longer, and __eq__ looks at it anyway.
        return hash((self.config, self.dtype))

    def empty_cache(self, rows: int, length: int) -> list[cache.LayerCache]:
        c = self.config
        made = cache.empty(c.num_layers, rows, c.num_kv_heads, length, c.head_dim, self.dtype)
        if self.mesh is None:
            return made
        # Born where it will lie: one device might not hold all of it.
        mesh = self.mesh
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self._spec(x))), made)

    def forward(self, params, tokens, positions, attend, layer_caches, masks=None):
        model = self._model(params)
        rest = {"positions": positions, "attend": attend, "layer_states": layer_caches, "dtype": self.dtype}
        if masks is None:
            return model(tokens, **rest)
        rest["gate"] = Gate(tokens.shape[1], masks.count, masks.open)
        if masks.vectors is not None:
            vectors = masks.vectors.astype(self.dtype)
        elif model.masks is not None:
            vectors = model.masks(masks.ranks, self.dtype)
        else:
            return model(tokens, **rest)
        vectors = jnp.broadcast_to(vectors, (tokens.shape[0], masks.count, vectors.shape[-1]))
        first = tokens.shape[1] - masks.count
        embedded = model.embed(tokens if masks.open is not None else tokens[:, :first], self.dtype)
        if masks.open is not None:
            vectors = jnp.where(masks.open[..., None], vectors, embedded[:, first:])
        return model(embeddings=jnp.concatenate([embedded[:, :first], vectors], 1), **rest)

    def embed(self, params, tokens):
        return self._model(params).embed(tokens, jnp.float32)

    def unembed(self, params, hidden):
        model = self._model(params)
        return cpu.unembed(model, hidden) if self.for_cpu else model.unembed(hidden)

    def sample(self, params, before, hidden):
        model = self._model(params)
        assert model.sampler is not None
        return model.sampler(model.embed(before, self.dtype), hidden)

    def unembed_some(self, params, hidden, ids):
        model = self._model(params)
        if model.head is None:
            rows = model.embed(ids, hidden.dtype)
        else:
            rows = (cpu.head_rows if self.for_cpu else _head_rows)(cast(Any, model.head), ids).astype(hidden.dtype)
        return jnp.einsum("nd,ncd->nc", hidden, rows, preferred_element_type=jnp.float32)

    def commit(self, old, slots, first, entries, cursor, writes):
        def run(old, slots, first, cursor, writes):
            return cache.commit(old, slots, first, entries, cursor, writes)

        return self._by_lane(run, old, slots, first, cursor, writes)

    def write_rows(self, old, new, start, writes):
        return self._by_lane(cache.write_rows, old, new, start, writes)

    def _by_lane(self, write, *arrays):
        """Writes at data-dependent places: each device those of its own lanes, or they would all be gathered first."""
        if self.mesh is None or self.lane_groups == 1 or arrays[-1].shape[0] % self.lane_groups:  # one lane's prefill
            return write(*arrays)
        specs = jax.tree.map(self._spec, arrays)
        return jax.shard_map(write, mesh=self.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)

    @property
    def lane_groups(self) -> int:
        """Groups of devices that have lanes of their own."""
        return 1 if self.mesh is None else self.mesh.shape.get("data", 1)

    @property
    def short_steps(self) -> bool:
        return self.for_cpu

    def state_sharding(self, params, state):
        """With the weights. Over a mesh: lanes along `data`, heads of the cache along `tensor`."""
        if self.mesh is None:
            return next((p.sharding for p in params if hasattr(p, "sharding")), None)
        mesh = self.mesh
        return jax.tree.map(lambda x: NamedSharding(mesh, self._spec(x)), state)

    def _spec(self, x) -> PartitionSpec:
        assert self.mesh is not None
        lanes = "data" if x.ndim and self.lane_groups > 1 else None
        if lanes and x.shape[0] % self.lane_groups:
            raise ValueError(f"{x.shape[0]} lanes cannot be spread over a mesh with data={self.lane_groups}")
        is_cache = x.ndim == 4
        tensor = self.mesh.shape.get("tensor", 1)
        heads = "tensor" if is_cache and tensor > 1 and x.shape[1] % tensor == 0 else None
        return PartitionSpec(lanes, heads) if is_cache else PartitionSpec(lanes) if x.ndim else PartitionSpec()

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
    sharding = getattr(leaves[0], "sharding", None)
    mesh = cast(Mesh, sharding.mesh) if isinstance(sharding, NamedSharding) else None
    return DecoderNetwork(model.config, graphdef, treedef, jnp.dtype(dtype), for_cpu, mesh), tuple(leaves)


def abstract(config: ModelConfig, dtype: Any, mesh: Mesh) -> tuple[DecoderNetwork, tuple[jax.ShapeDtypeStruct, ...]]:
    """(network, shapes of its params on `mesh`), to compile for devices that are not here. Weights have `dtype`."""
    graphdef, state = abstract_decoder(config, "list", dtype)
    leaves, treedef = jax.tree.flatten(state)
    places = jax.tree.leaves(shardings(state, mesh))
    params = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p) for x, p in zip(leaves, places, strict=True))
    return DecoderNetwork(config, graphdef, treedef, jnp.dtype(dtype), False, mesh), params


def _head_rows(head: Linear, ids: jax.Array) -> jax.Array:
    """Of the last matrix, those [..., D] that give the logits of `ids` [...]."""
    return jnp.moveaxis(jnp.take(head.kernel[...], ids, axis=1), 0, -1)


def _on_one_cpu(array: Any) -> bool:
    devices = array.devices() if isinstance(array, jax.Array) else ()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"
