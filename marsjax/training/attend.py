"""The attention that the objectives plug into the decoder. Masks are computed inside the program, from the batch."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from marsjax.attention import dense
from marsjax.attention.dense import Part, attend_part, group, heads_first, join, ungroup
from marsjax.attention.masks import Rows, causal, dense_mask, joined, two_stream
from marsjax.models.decoder import Attend

Attention = Literal["blocks", "dense"]


def causal_attend(rows: Rows) -> Attend:
    """Causal attention within documents; fields of `rows` are [N, S]."""
    mask = dense_mask(causal, rows)
    return lambda q, k, v, state: (dense.attend(q, k, v, mask), state)


def two_stream_attend(
    clean: Rows, noisy: Rows, block_size: int, attention: Attention = "blocks", rule: Callable = two_stream
) -> Attend:
    """Attention over `[clean | noisy]`; clean [N, L], noisy [N, M].

    `rule` of `marsjax.attention.masks` says who sees whom: `two_stream` (MARS) or `block_diffusion`.

    "dense" takes any rows and computes the (L+M)² square, of which at most a quarter counts. "blocks" computes the
    clean square, and for the noisy rows the clean prefix and their own block: half the work and memory. It needs
    every run of `block_size` noisy rows to lie in one block (`marsjax.training.objectives.check_aligned`).
    """
    if attention == "dense":
        mask = dense_mask(rule, joined(clean, noisy, jnp))
        return lambda q, k, v, state: (dense.attend(q, k, v, mask), state)
    if attention != "blocks":
        raise ValueError(f"attention {attention!r} is not one of blocks, dense")
    length, noisy_length = clean.position.shape[1], noisy.position.shape[1]
    padded = -(-noisy_length // block_size) * block_size

    def in_blocks(x):
        x = jnp.pad(x, ((0, 0), (0, padded - noisy_length), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], padded // block_size, block_size, *x.shape[2:])

    clean_mask = dense_mask(rule, clean)
    prefix_mask = dense_mask(rule, noisy, clean)
    own = Rows(*(in_blocks(field) for field in noisy))
    own_mask = dense_mask(rule, own)

    def attend(q, k, v, state):
        kv_heads = k.shape[2]
        of_clean = dense.attend(q[:, :length], k[:, :length], v[:, :length], clean_mask)

        keys, values = (heads_first(x[:, :length]) for x in (k, v))
        prefix = attend_part(group(q[:, length:], kv_heads), (keys, values, prefix_mask))
        q, k, v = (in_blocks(x[:, length:]) for x in (q, k, v))
        own = attend_part(group(q, kv_heads), (heads_first(k), heads_first(v), own_mask))
        own = Part(*(_rows_of_blocks(x, block_size, noisy_length) for x in own))
        of_noisy = ungroup(join(prefix, own), noisy_length)
        return jnp.concatenate([of_clean, of_noisy.astype(of_clean.dtype)], axis=1), state

    return attend


def _rows_of_blocks(x: jax.Array, block_size: int, noisy_length: int) -> jax.Array:
    """[N, blocks, K, G*B, ...] → [N, K, G*M, ...]: the parts of all blocks as the part of the whole noisy stream."""
    n, blocks, kv_heads, rows, width = x.shape
    x = jnp.moveaxis(x.reshape(n, blocks, kv_heads, rows // block_size, block_size, width), 1, 3)
    x = x.reshape(n, kv_heads, rows // block_size, blocks * block_size, width)[..., :noisy_length, :]
    return x.reshape(n, kv_heads, -1, width)
