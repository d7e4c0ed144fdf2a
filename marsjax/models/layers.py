"""What decoders are made of: weights with named axes, linears with an adapter or without, norms."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from marsjax.models.config import AdapterConfig
from marsjax.parallel.sharding import constrain


class Param(nnx.Param):
    """A weight that carries the logical names of its axes, which `parallel.sharding` maps to a mesh."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], scale: float, dtype) -> Param:
    return Param(scale * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """Where gated adapters act: on the last `count` of `length` columns, or on those of them where `open` says so."""

    length: int = dataclasses.field(metadata={"static": True})
    count: int = dataclasses.field(metadata={"static": True})
    open: jax.Array | None = None  # [N, count] bool


class LoRA(nnx.Module):
    """What an adapter adds to a linear: (alpha / r) · x A B, with A [in, r] and B [r, out], zero at first."""

    def __init__(self, d_in: int, d_out: int, axes, c: AdapterConfig, *, lead=(), rngs, dtype):
        names = ("layer",) * len(lead)
        self.a = normal(rngs, (*lead, d_in, c.rank), (*names, axes[0], None), d_in**-0.5, dtype)
        self.b = Param(jnp.zeros((*lead, c.rank, d_out), dtype), axes=(*names, None, axes[1]))
        self.scale, self.gated = c.alpha / c.rank, c.gated

    def add(self, y: jax.Array, x: jax.Array, gate: Gate | None) -> jax.Array:
        """y [..., out] and what the adapter makes of x [..., in]; if it is gated, of the rows where the gate is open.
        The others stay as they are, bit for bit."""
        if not self.gated:
            return y + self(x).astype(y.dtype)
        if gate is None or not gate.count:
            return y
        rows, whole = (z.reshape(-1, gate.length, z.shape[-1]) for z in (x, y))
        first = gate.length - gate.count
        old = whole[:, first:]
        adapted = old + self(rows[:, first:]).astype(y.dtype)
        if gate.open is not None:
            adapted = jnp.where(gate.open[..., None], adapted, old)
        return jax.lax.dynamic_update_slice_in_dim(whole, adapted, first, axis=1).reshape(y.shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x @ self.a[...].astype(x.dtype)) @ self.b[...].astype(x.dtype) * self.scale


class Linear(nnx.Module):
    """y = x W + b, with W stored [in, out]."""

    def __init__(self, d_in: int, d_out: int, axes, *, bias=False, lead=(), rngs, scale, dtype, adapter=None):
        names = ("layer",) * len(lead)
        self.kernel = normal(rngs, (*lead, d_in, d_out), (*names, *axes), scale, dtype)
        self.bias = Param(jnp.zeros((*lead, d_out), dtype), axes=(*names, axes[1])) if bias else None
        self.out_axis = axes[1]
        self.adapter = LoRA(d_in, d_out, axes, adapter, lead=lead, rngs=rngs, dtype=dtype) if adapter else None

    def __call__(self, x: jax.Array, gate: Gate | None = None) -> jax.Array:
        # Rows flattened: with two leading axes XLA:CPU makes transposed copies for the weights' gradient (1.7x a step).
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ self.kernel[...].astype(x.dtype)
        y = y if self.bias is None else y + self.bias[...].astype(x.dtype)
        y = y if self.adapter is None else self.adapter.add(y, rows, gate)
        return constrain(y.reshape(*x.shape[:-1], y.shape[-1]), "batch", *(None,) * (x.ndim - 2), self.out_axis)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float, *, lead=(), dtype):
        self.scale = Param(jnp.ones((*lead, size), dtype), axes=("layer",) * len(lead) + (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Over the last axis, in float32, with scale and bias."""

    def __init__(self, size: int, *, dtype):
        self.scale, self.bias = (Param(x, axes=(None,)) for x in (jnp.ones(size, dtype), jnp.zeros(size, dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, -1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + 1e-5)
        return (x32 * self.scale[...] + self.bias[...]).astype(x.dtype)
