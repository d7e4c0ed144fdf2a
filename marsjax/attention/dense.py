"""Attention written out: the reference every other path is held against, and the path for short sequences.

Attention to a set of keys can be computed in parts, one for each disjoint subset, and joined afterwards: a decode step
has the cache and its own slots, a noisy training row has the clean prefix and its own block.

Letters in shapes: N rows, Q queries, T keys, H query heads, K key/value heads, G = H / K, h head_dim.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

# A finite floor, not -inf: rows that see nothing must not make NaN, forward or backward.
_FLOOR = float(jnp.finfo(jnp.float32).min)


class Part(NamedTuple):
    """Attention to some of the keys, in float32: an unnormalised mixture, its weight, and the highest score."""

    mixed: jax.Array  # [..., K, G*Q, h]
    weight: jax.Array  # [..., K, G*Q, 1]
    top: jax.Array  # [..., K, G*Q, 1]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention; softmax in float32; a row that may see nothing gives 0, also in its gradient.

    Args:
      q: [N, Q, H, h]. k, v: [N, T, K, h] with H a multiple of K; keys are shared, never repeated.
      mask: [N, Q, T] bool, True where the query may see the key.

    Returns:
      [N, Q, H, h] in q's dtype.
    """
    part = attend_part(group(q, k.shape[2]), (heads_first(k), heads_first(v), mask))
    return ungroup(join(part), q.shape[1]).astype(q.dtype)


def heads_first(x: jax.Array) -> jax.Array:
    """[..., T, K, h] → [..., K, T, h]: the products below then run over contiguous matrices."""
    return jnp.swapaxes(x, -3, -2)


def group(q: jax.Array, kv_heads: int) -> jax.Array:
    """[..., Q, H, h] → [..., K, G*Q, h]: the queries that share a key head become rows of one matrix."""
    *lead, queries, heads, head_dim = q.shape
    q = jnp.moveaxis(q.reshape(*lead, queries, kv_heads, heads // kv_heads, head_dim), -4, -2)
    return q.reshape(*lead, kv_heads, -1, head_dim)


def ungroup(mixed: jax.Array, queries: int) -> jax.Array:
    """[..., K, G*Q, h] → [..., Q, H, h]."""
    *lead, kv_heads, rows, head_dim = mixed.shape
    mixed = jnp.moveaxis(mixed.reshape(*lead, kv_heads, rows // queries, queries, head_dim), -2, -4)
    return mixed.reshape(*lead, queries, -1, head_dim)


def attend_part(q: jax.Array, *sets: tuple[jax.Array, jax.Array, jax.Array]) -> Part:
    """Attention of q [..., K, G*Q, h] to one or more sets of keys: k, v [..., K, T, h] and `mask` [..., Q, T] of each.

    Sets differ in T. One softmax runs over them all: the part is what it would be of the sets as one.
    """
    scores = [_masked(_scores(q, k), mask, _FLOOR) for k, _, mask in sets]
    top = jax.lax.stop_gradient(reduce(jnp.maximum, (s.max(-1, keepdims=True) for s in scores)))
    mixed, weight = [], []
    for s, (_, v, mask) in zip(scores, sets, strict=True):
        weights = _masked(jnp.exp(s - top), mask, 0.0)
        mixed.append(jnp.einsum("...qt,...th->...qh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32))
        weight.append(weights.sum(-1, keepdims=True))
    return Part(reduce(jnp.add, mixed), reduce(jnp.add, weight), top)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """[..., K, G*Q, T] float32."""
    return jnp.einsum("...qh,...th->...qt", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5


def _masked(x: jax.Array, mask: jax.Array, floor: float) -> jax.Array:
    """x [..., K, G*Q, T] where `mask` [..., Q, T] allows (Q = 1: the same for all rows), else `floor`."""
    *lead, rows, keys = x.shape
    by_query = x.reshape(*lead, rows // mask.shape[-2], mask.shape[-2], keys)
    return jnp.where(mask[..., None, None, :, :], by_query, floor).reshape(x.shape)


def join(*parts: Part) -> jax.Array:
    """Attention to all the keys of the parts, [..., K, G*Q, h] float32; rows without any key give 0."""
    if len(parts) > 1:
        top = reduce(jnp.maximum, (part.top for part in parts))
        scales = [jnp.exp(part.top - top) for part in parts]
        mixed = sum(part.mixed * scale for part, scale in zip(parts, scales, strict=True))
        weight = sum(part.weight * scale for part, scale in zip(parts, scales, strict=True))
    else:
        mixed, weight, _ = parts[0]
    return mixed / jnp.where(weight > 0, weight, 1.0)
