"""Keys and values of committed tokens: read-only while a step attends, written once at its end.

Letters in shapes: N rows, S slots, T cache length, H query heads, K key/value heads, G = H / K, h head_dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marsjax.attention import dense


class LayerCache(NamedTuple):
    """One layer. Heads come before time, so that the products of attention read the cache as it lies."""

    k: jax.Array  # [N, K, T, h]
    v: jax.Array  # [N, K, T, h]


def empty(layers: int, rows: int, kv_heads: int, length: int, head_dim: int, dtype: Any) -> list[LayerCache]:
    shape = (rows, kv_heads, length, head_dim)
    return [LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers)]


def attend_cache_and_slots(cursor: jax.Array, sees: jax.Array):
    """An `attend` for the decoder: every slot sees the committed cache and the slots `sees` allows.

    Two sets of keys under one softmax, so that slots need not be written before they are seen.

    Args:
      cursor: [N] int32, entries of the cache that are valid.
      sees: [N, S, S] bool; slots that see nothing give 0.

    Returns:
      attend(q, k, v, LayerCache) → (mixed [N,S,H,h], the slots' own LayerCache [N,K,S,h]).
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache):
        slots, kv_heads, length = q.shape[1], k.shape[2], cache.k.shape[2]
        q, k, v = dense.group(q, kv_heads), dense.heads_first(k), dense.heads_first(v)
        committed = jnp.arange(length) < cursor[:, None, None]  # [N, 1, T]: the same for all slots
        mixed = dense.join(dense.attend_part(q, (cache.k, cache.v, committed), (k, v, sees)))
        return dense.ungroup(mixed, slots).astype(q.dtype), LayerCache(k, v)

    return attend


def commit(
    cache: list[LayerCache],
    slots: list[LayerCache],
    first: jax.Array,
    entries: int,
    cursor: jax.Array,
    writes: jax.Array,
) -> list[LayerCache]:
    """Write slots `first[r] .. first[r] + entries` of each row r at its cursor, in every layer.

    Entries past the row's new cursor are leftovers nobody sees; the cache must still have room for them, since a slice
    that reaches past the end would be moved back, over good entries. Rows where `writes` is False stay as they are.

    Args:
      cache: [N, K, T, h] a layer. slots: [N, K, S, h] a layer, S ≥ first + entries.
      first, cursor: [N] int32. writes: [N] bool.
    """

    rows, time = cursor.shape[0], 2

    def write_row(row, cache):
        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            sizes = (1, new.shape[1], entries, new.shape[3])
            taken = jax.lax.dynamic_slice(new, (row, 0, first[row], 0), sizes)
            return _write(old, taken, row, cursor[row], writes[row], time)

        return jax.tree.map(write, cache, slots)

    return jax.lax.fori_loop(0, rows, write_row, cache)


def write_rows(old: jax.Array, new: jax.Array, start: jax.Array, writes: jax.Array) -> jax.Array:
    """`old[r, start[r] : start[r] + E] = new[r]` where `writes[r]`. old [N, T], new [N, E], start and writes [N]."""

    def write_row(row, old):
        taken = jax.lax.dynamic_slice_in_dim(new, row, 1)
        return _write(old, taken, row, start[row], writes[row], 1)

    return jax.lax.fori_loop(0, old.shape[0], write_row, old)


def _write(old, new, row, start, writes, axis: int):
    """One bounded slice of one row, in place. A vmapped update would become a scatter; unrolled rows compile slowly."""
    index = [jnp.int32(0)] * old.ndim
    index[0], index[axis] = row, start
    kept = jax.lax.dynamic_slice(old, index, new.shape)
    return jax.lax.dynamic_update_slice(old, jnp.where(writes, new, kept), index)
