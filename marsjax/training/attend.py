"""The attention that the objectives plug into the decoder. Masks are computed inside the program, from the batch."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from marsjax.attention import dense, splash
from marsjax.attention.dense import Part, attend_part, group, heads_first, join, ungroup
from marsjax.attention.masks import Rows, causal, dense_mask, joined, multi_token, two_stream
from marsjax.models.decoder import Attend

Attention = Literal["blocks", "dense", "splash"]
SCORE_BYTES = 256 * 2**20  # of one device's float32 scores; "blocks" computes longer ones some rows at a time
LEAST_ROWS = 128  # at a time


def causal_attend(rows: Rows, attention: Attention = "blocks", *, interpret: bool | None = None) -> Attend:
    """Causal attention within documents; fields of `rows` are [N, S]. See `two_stream_attend`."""
    if _checked(attention) == "splash":
        return splash.causal_attend(rows.segment, interpret=_interpreted(interpret))
    mask = dense_mask(causal, rows)
    if attention == "dense":
        return lambda q, k, v, state: (dense.attend(q, k, v, mask), state)

    def attend(q, k, v, state):
        def some(q, some):
            return dense.attend(q, k, v, mask if some is rows else dense_mask(causal, some, rows))

        return _by_rows(some, _rows_at_a_time(q, k.shape[1]), q, rows), state

    return attend


def two_stream_attend(
    clean: Rows,
    noisy: Rows,
    block_size: int,
    attention: Attention = "blocks",
    rule: Callable = two_stream,
    *,
    columns: jax.Array | None = None,
    interpret: bool | None = None,
) -> Attend:
    """Attention over `[clean | noisy]`; clean [N, L], noisy [N, M].

    `rule` of `marsjax.attention.masks` says who sees whom: `two_stream` (MARS), `block_diffusion`, or `multi_token`, of
    which block_size is the number of masks behind an anchor.

    "dense" takes any rows and computes the (L+M)² square, of which at most a quarter counts. "blocks" computes the
    clean square, and for the noisy rows the clean prefix and their own block: half the work, and bounded memory. It
    needs every run of `block_size` noisy rows to lie in one block (`marsjax.training.objectives.check_aligned`).
    "splash" is the TPU's kernel (`marsjax.attention.splash`). It needs the same, and `columns` [N, M], ascending,
    where the noisy rows, or their anchors, stand in the clean stream (`splash.two_stream_attend` has the bounds); None:
    M = L, at their own. `interpret` runs it in plain JAX; None: where JAX runs on no TPU. Say False to compile for a
    TPU that is not here.
    """
    length = clean.position.shape[1]
    if _checked(attention) == "splash":
        columns = _columns(clean, noisy, rule) if columns is None else columns
        return splash.two_stream_attend(
            clean.segment, noisy.segment, columns, block_size, rule=rule, interpret=_interpreted(interpret)
        )
    if attention == "dense":
        mask = dense_mask(rule, joined(clean, noisy, jnp))
        return lambda q, k, v, state: (dense.attend(q, k, v, mask), state)

    # Computed once for all layers where all rows are computed at a time, and dropped by the compiler where not.
    clean_mask = dense_mask(rule, clean)
    behind = behind_attend(clean, noisy, block_size, attention, rule)

    def attend(q, k, v, state):
        keys, values = k[:, :length], v[:, :length]

        def of_clean(q, rows):
            return dense.attend(q, keys, values, clean_mask if rows is clean else dense_mask(rule, rows, clean))

        mixed = (
            _by_rows(of_clean, _rows_at_a_time(q[:, :length], length), q[:, :length], clean),
            behind(q[:, length:], k[:, length:], v[:, length:], (keys, values))[0],
        )
        return jnp.concatenate(mixed, axis=1), state

    return attend


def keeping(attend: Attend) -> Attend:
    """The same attention, which leaves each layer's keys and values [N, S, K, h] behind as its state."""
    return lambda q, k, v, state: (attend(q, k, v, state)[0], (k, v))


def behind_attend(
    clean: Rows,
    noisy: Rows,
    block_size: int,
    attention: Attention = "blocks",
    rule: Callable = two_stream,
    *,
    constant: bool = False,
    columns: jax.Array | None = None,
    interpret: bool | None = None,
) -> Attend:
    """Attention of the noisy rows alone; a layer's state is the clean rows' keys and values, and stays. See
    `two_stream_attend`. `constant`: the state gets no gradient, which the kernel must know beforehand to save it."""
    if _checked(attention) == "splash":
        columns = _columns(clean, noisy, rule) if columns is None else columns
        return splash.behind_attend(
            clean.segment, noisy.segment, columns, block_size,
            rule=rule, constant=constant, interpret=_interpreted(interpret),
        )  # fmt: skip
    if attention == "dense":
        mask = dense_mask(rule, noisy, joined(clean, noisy, jnp))

        def over_both(q, k, v, state):
            kept = jax.lax.stop_gradient(state) if constant else state
            keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(kept, (k, v), strict=True))
            return dense.attend(q, keys, values, mask), state

        return over_both

    def in_blocks(x):
        count = -(-x.shape[1] // block_size)
        x = jnp.pad(x, ((0, 0), (0, count * block_size - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], count, block_size, *x.shape[2:])

    def noisy_masks(rows):
        return dense_mask(rule, rows, clean), dense_mask(rule, Rows(*(in_blocks(field) for field in rows)))

    whole_masks = noisy_masks(noisy)

    def attend(q, k, v, state):
        keys, values = jax.lax.stop_gradient(state) if constant else state
        kv_heads = k.shape[2]

        def some(q, k, v, rows):
            prefix_mask, own_mask = whole_masks if rows is noisy else noisy_masks(rows)
            count = q.shape[1]
            prefix = attend_part(group(q, kv_heads), (heads_first(keys), heads_first(values), prefix_mask))
            own_q, own_k, own_v = (in_blocks(x) for x in (q, k, v))
            own = attend_part(group(own_q, kv_heads), (heads_first(own_k), heads_first(own_v), own_mask))
            own = Part(*(_rows_of_blocks(x, block_size, count) for x in own))
            return ungroup(join(prefix, own), count).astype(q.dtype)

        return _by_rows(some, _rows_at_a_time(q, keys.shape[1], block_size), q, k, v, noisy), state

    return attend


def _checked(attention: str) -> str:
    if attention not in ("blocks", "dense", "splash"):
        raise ValueError(f"attention {attention!r} is not one of blocks, dense, splash")
    return attention


def _columns(clean: Rows, noisy: Rows, rule: Callable) -> jax.Array:
    length, noisy_length = clean.position.shape[1], noisy.position.shape[1]
    if noisy_length != length or rule is multi_token:
        raise ValueError(f"splash attention of {noisy_length} noisy rows to {length} needs their columns")
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), noisy.segment.shape)


def _interpreted(interpret: bool | None) -> bool:
    return jax.default_backend() != "tpu" if interpret is None else interpret


def _rows_at_a_time(q: jax.Array, keys: int, block_size: int = 1) -> int:
    """The rows of q [N, S, H, h] in even parts of at most `SCORE_BYTES` of scores on a device; whole blocks."""
    mesh, unit = jax.sharding.get_abstract_mesh(), math.lcm(block_size, LEAST_ROWS)
    n, rows, heads, _ = q.shape
    a_row = 4 * n * heads * keys // (1 if mesh.empty else mesh.size)
    most = unit * max(1, SCORE_BYTES // max(a_row, 1) // unit)
    times = max(1, -(-rows // most))
    return unit * -(-rows // (times * unit))


def _by_rows(some: Callable[..., jax.Array], at_a_time: int, *xs: Any) -> jax.Array:
    """`some(*xs)` over arrays [N, S, ...], so many rows at a time; what is between is computed again in the backward
    pass. Rows are padded with 0."""
    n, rows = jax.tree.leaves(xs)[0].shape[:2]
    if rows <= at_a_time:
        return some(*xs)
    times = -(-rows // at_a_time)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, times * at_a_time - rows), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(n, times, at_a_time, *x.shape[2:]), 1, 0)

    mixed = jax.lax.map(lambda xs: jax.checkpoint(some)(*xs), jax.tree.map(split, xs))
    return jnp.moveaxis(mixed, 0, 1).reshape(n, times * at_a_time, *mixed.shape[3:])[:, :rows]


def _rows_of_blocks(x: jax.Array, block_size: int, noisy_length: int) -> jax.Array:
    """[N, blocks, K, G*B, ...] → [N, K, G*M, ...]: the parts of all blocks as the part of the whole noisy stream."""
    n, blocks, kv_heads, rows, width = x.shape
    x = jnp.moveaxis(x.reshape(n, blocks, kv_heads, rows // block_size, block_size, width), 1, 3)
    x = x.reshape(n, kv_heads, rows // block_size, blocks * block_size, width)[..., :noisy_length, :]
    return x.reshape(n, kv_heads, -1, width)
