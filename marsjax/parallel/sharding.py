"""Logical axes of weights and activations → mesh axes: one small table.

Whoever runs a program on a mesh sets it (`jax.set_mesh`); `constrain` then says where activations lie. Without a mesh
it does nothing, so that one model serves one chip and a pod.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# Mesh axes: `slice` is `data` across the slower network between pods' slices, `data` replicates weights, `fsdp` splits
# them along the embedding (and the batch as `data` does), `tensor` splits heads and MLP.
AXES = ("slice", "data", "fsdp", "tensor")
RULES: dict[str, tuple[str, ...]] = {
    # weights
    "layer": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    # activations
    "batch": ("slice", "data", "fsdp"),
}


class Heads(NamedTuple):
    """A logical axis of whole heads, `head_dim` columns each, which no device boundary may cut."""

    name: str
    head_dim: int


Axis = str | Heads | None


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """A mesh over the first prod(sizes) devices, e.g. `make_mesh(data=2, tensor=4)`; axes are those of `AXES`.

    `devices`: of another machine (ahead-of-time compilation); None: those that JAX shows. Neighbours in the mesh are
    neighbours in the slice's network, and `slice` runs across slices where there are several.
    """
    for name, size in sizes.items():
        if name not in AXES:  # the rules know no other, so all weights would be replicated along it
            raise ValueError(f"{name} is no axis of a mesh; the axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    found = jax.devices() if devices is None else list(devices)
    needed, there = math.prod(sizes.values()), len(found)
    if needed > there:
        shape = ", ".join(f"{name}={size}" for name, size in sizes.items())
        way_out = "lower the sizes"
        if found[0].platform == "cpu":
            way_out += f", or set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts"
        raise ValueError(
            f"a mesh of {shape} takes {needed} devices, but there are {there} ({found[0].platform}): {way_out}"
        )
    names = tuple(sizes)
    placed = _placed(found[:needed], sizes)
    return Mesh(placed, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def _placed(devices: list[Any], sizes: dict[str, int]) -> np.ndarray:
    shape = tuple(sizes.values())
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if sizes.get("slice", 1) != len(slices):
        raise ValueError(f"the devices lie in {len(slices)} slices, but the mesh has slice={sizes.get('slice', 1)}")
    within = tuple(1 if name == "slice" else size for name, size in sizes.items())
    across = tuple(size if name == "slice" else 1 for name, size in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def spec(axes: Sequence[Axis], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The partition of one array: every dimension along the mesh axes of its rule, as far as they divide it.

    A dimension that they do not divide (or that would cut a head) is replicated, and a mesh axis is used once.
    """
    entries: list[Any] = []
    used: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
        name, unit = axis if isinstance(axis, Heads) else (axis, 1)
        along = [a for a in (RULES[name] if name is not None else ()) if mesh.shape.get(a, 1) > 1 and a not in used]
        if (size // unit) % math.prod(mesh.shape[a] for a in along):
            along = []
        used.update(along)
        entries.append(along[0] if len(along) == 1 else tuple(along) or None)
    return PartitionSpec(*entries)


def shardings(params: nnx.State, mesh: Mesh) -> Any:
    """A pytree like `params` (abstract or real) with a NamedSharding for every weight."""

    def of(variable: nnx.Variable):
        shape = variable.get_raw_value().shape
        return variable.replace(NamedSharding(mesh, spec(variable.get_metadata("axes"), shape, mesh)))

    return jax.tree.map(of, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """x with its dimensions laid along the mesh that is set (`jax.set_mesh`), one logical axis a dimension."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def everywhere(tree: Any) -> Any:
    """The arrays of a tree, whole on every device of the mesh that is set: every process can read them."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), tree)


def batch_axes(mesh: Mesh | AbstractMesh, rows: int) -> tuple[str, ...]:
    """The mesh axes along which `rows` rows lie; () where they are not spread."""
    along = spec(("batch",), (rows,), mesh)[0]
    return along if isinstance(along, tuple) else () if along is None else (along,)
