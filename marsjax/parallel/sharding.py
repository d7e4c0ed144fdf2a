"""Logical axes of the weights → mesh axes: one small table."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Mesh axes: `data` replicates weights, `fsdp` splits them along the embedding, `tensor` along heads and MLP,
# `slice` is `data` across pods.
AXES = ("data", "fsdp", "tensor", "slice")
RULES: dict[str, str | None] = {
    "layer": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


def make_mesh(**sizes: int) -> Mesh:
    """A mesh over the first prod(sizes) devices, e.g. `make_mesh(data=2, tensor=4)`; axes are those of `AXES`."""
    for name, size in sizes.items():
        if name not in AXES:  # the rules know no other, so all weights would be replicated along it
            raise ValueError(f"{name} is no axis of a mesh; the axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    needed, there = math.prod(sizes.values()), jax.device_count()
    if needed > there:
        shape = ", ".join(f"{name}={size}" for name, size in sizes.items())
        way_out = "lower the sizes"
        if jax.default_backend() == "cpu":
            way_out += f", or set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts"
        raise ValueError(
            f"a mesh of {shape} takes {needed} devices, but there are {there} ({jax.default_backend()}): {way_out}"
        )
    axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The partition of one array. A dimension that its mesh axis does not divide is replicated."""
    entries: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        axis = RULES[name] if name is not None else None
        divides = axis in mesh.shape and size % mesh.shape[axis] == 0 and axis not in entries
        entries.append(axis if divides else None)
    return PartitionSpec(*entries)


def shardings(params: nnx.State, mesh: Mesh) -> Any:
    """A pytree like `params` (abstract or real) with a NamedSharding for every weight."""

    def of(variable: nnx.Variable):
        shape = variable.get_raw_value().shape
        return variable.replace(NamedSharding(mesh, spec(variable.get_metadata("axes"), shape, mesh)))

    return jax.tree.map(of, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
