"""A decoder laid out for XLA's CPU backend, whose matrix products of few rows leave much of a processor idle.

Measured on two cores (`docs/benchmarks.md`): products of one row or few read their weights with one thread unless they
are several independent products, and several small ones run one after the other. So linears of one input become one
product, cut along its outputs into one part a thread.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from marsjax.models import Decoder
from marsjax.models.decoder import MLP, Attention
from marsjax.models.layers import Gate, Linear

MAX_PARTS = 8
_LAST = (((1,), (1,)), ((), ()))  # contract the last axis of both


def lay_out(model: Decoder, *, consume: bool) -> None:
    """Rearranges a decoder of the list layout in place. `consume` frees each old kernel on the way."""
    for layer in cast(nnx.List, model.layers):
        layer.attn = CpuAttention(layer.attn, consume)
        layer.mlp = CpuMLP(layer.mlp, consume)
    if model.head is not None:
        model.head = cast(Any, JointLinear([model.head], consume))


def unembed(model: Decoder, hidden: jax.Array) -> jax.Array:
    """`Decoder.unembed` of a decoder laid out here."""
    if isinstance(model.head, JointLinear):
        return model.head(hidden, out_dtype=jnp.float32)[0]
    table = model.embed_table.embedding[...].astype(hidden.dtype)
    return multiply(hidden, [table], jnp.float32)


def head_rows(head: "JointLinear", ids: jax.Array) -> jax.Array:
    """Of the last matrix, those [..., D] that give the logits of `ids` [...]."""
    size = head.parts[0].shape[0]
    found = [part[...].at[ids - i * size].get(mode="clip") for i, part in enumerate(head.parts)]
    whose = (ids // size)[..., None]
    return jnp.select([whose == i for i in range(len(found))], found)


class CpuAttention(Attention):
    def __init__(self, attn: Attention, consume: bool):
        self.qkv = JointLinear([attn.q, attn.k, attn.v], consume)
        self.out = JointLinear([attn.o], consume)
        self.q_norm, self.k_norm, self.head_dim = attn.q_norm, attn.k_norm, attn.head_dim

    def project(self, x: jax.Array, gate: Gate | None) -> Sequence[jax.Array]:
        return self.qkv(x, gate)

    def o(self, x: jax.Array, gate: Gate | None) -> jax.Array:  # type: ignore[override]
        return self.out(x, gate)[0]


class CpuMLP(MLP):
    def __init__(self, mlp: MLP, consume: bool):
        self.gate_up = JointLinear([mlp.gate, mlp.up], consume)
        self.out = JointLinear([mlp.down], consume)

    def project(self, x: jax.Array, gate: Gate | None) -> Sequence[jax.Array]:
        return self.gate_up(x, gate)

    def down(self, x: jax.Array, gate: Gate | None) -> jax.Array:  # type: ignore[override]
        return self.out(x, gate)[0]


class JointLinear(nnx.Module):
    """Linears of one input as one product. Kernels lie [out, in], in parts along the outputs."""

    def __init__(self, linears: Sequence[Linear], consume: bool):
        kernels = [linear.kernel[...] for linear in linears]
        self.sizes = tuple(kernel.shape[1] for kernel in kernels)
        joint = jnp.concatenate([kernel.T for kernel in kernels])
        parts = _divisor(joint.shape[0], threads())
        self.parts = nnx.List(nnx.Param(part) for part in jax.block_until_ready(jnp.split(joint, parts)))
        biases = [linear.bias[...] for linear in linears if linear.bias is not None]
        self.bias = nnx.Param(jnp.concatenate(biases)) if biases else None
        self.adapters = nnx.List(linear.adapter for linear in linears)
        if consume:
            for kernel in kernels:
                kernel.delete()

    def __call__(self, x: jax.Array, gate: Gate | None = None, *, out_dtype: Any = None) -> list[jax.Array]:
        """x [..., in] → [..., out] of each linear, in `out_dtype` (None: x's)."""
        y = multiply(x, [part[...].astype(x.dtype) for part in self.parts], out_dtype)
        y = y if self.bias is None else y + self.bias[...].astype(y.dtype)
        ys = jnp.split(y, np.cumsum(self.sizes)[:-1], axis=-1)
        return [y if lora is None else lora.add(y, x, gate) for y, lora in zip(ys, self.adapters, strict=True)]


def multiply(x: jax.Array, parts: Sequence[jax.Array], out_dtype: Any = None) -> jax.Array:
    """x [..., in] times parts [out, in] of a matrix → [..., outs] in `out_dtype` (None: x's), in the fastest form.

    One row: a batch of products, of which each gets a thread. Few rows: W xᵀ, where the compiler walks the weights once
    without packing them. The barriers keep the compiler from turning either back into x Wᵀ, the form for many rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = partial(jax.lax.dot_general, preferred_element_type=out_dtype)

    def batched(w):
        batch = _divisor(w.shape[0], threads())
        w = w.reshape(batch, -1, w.shape[1])
        return product(w, jnp.broadcast_to(rows, (batch, *rows.shape)), (((2,), (2,)), ((0,), (0,))))

    if rows.shape[0] == 1:
        y = jnp.concatenate([jax.lax.optimization_barrier(batched(w)) for w in parts])
    elif rows.shape[0] < 16:
        y = jnp.concatenate([jax.lax.optimization_barrier(product(w, rows, _LAST)) for w in parts]).T
    else:
        y = jnp.concatenate([product(rows, w, _LAST) for w in parts], axis=-1)
    return y.reshape(*x.shape[:-1], -1)


def threads() -> int:
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MAX_PARTS)


def _divisor(n: int, at_most: int) -> int:
    return next(parts for parts in range(at_most, 0, -1) if n % parts == 0)
