"""Cross-entropy against a large vocabulary, a chunk of rows at a time.

With 150k tokens the logits of a whole batch are the largest array of training by far. They are never made: rows are
taken in chunks under a byte budget, and the backward pass computes a chunk's logits again.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

DEFAULT_CHUNK_BYTES = 256 * 2**20


class RowScores(NamedTuple):
    """What the head says about each row; all [N, S] float32, 0 where the row is not `wanted`."""

    cross_entropy: jax.Array
    correct: jax.Array
    confidence: jax.Array


def score_rows(
    unembed: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    wanted: jax.Array,
    *,
    vocab_size: int,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> RowScores:
    """Cross-entropy, top-1 hit and top-1 probability of the rows where `wanted`.

    Wanted rows are moved to the front of their sequence, and chunks without any are skipped: a prompt costs no head.
    Chunks run along the sequence, so that a batch split over devices stays split.

    Args:
      unembed: hidden [..., D] → logits [..., V] float32.
      hidden: [N, S, D]. targets: [N, S] int32. wanted: [N, S] bool.
      chunk_bytes: upper bound of one chunk's float32 logits; at least one column of N rows is taken.
    """
    n, s, _ = hidden.shape
    columns = max(1, min(s, chunk_bytes // (4 * n * vocab_size)))
    if columns == s:
        return _score(unembed, hidden, targets, wanted)
    chunks = -(-s // columns)
    columns = -(-s // chunks)
    order = jnp.argsort(~wanted, axis=1, stable=True)

    def to_chunks(x):
        x = jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)
        x = jnp.pad(x, ((0, 0), (0, chunks * columns - s), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(n, chunks, columns, *x.shape[2:]), 1, 0)

    def body(_, chunk):
        nothing = RowScores(*(jnp.zeros((n, columns), jnp.float32),) * 3)
        return None, jax.lax.cond(chunk[2].any(), lambda: _score(unembed, *chunk), lambda: nothing)

    body = jax.checkpoint(body, prevent_cse=False)
    _, scores = jax.lax.scan(body, None, (to_chunks(hidden), to_chunks(targets), to_chunks(wanted)))
    back = jnp.argsort(order, axis=1)

    def from_chunks(x):
        x = jnp.moveaxis(x, 0, 1).reshape(n, chunks * columns)[:, :s]
        return jnp.take_along_axis(x, back, axis=1)

    return RowScores(*map(from_chunks, scores))


def _score(unembed, hidden, targets, wanted) -> RowScores:
    logits = unembed(hidden)
    top = jax.lax.stop_gradient(logits.max(-1))
    shifted = logits - top[..., None]
    total = jnp.exp(shifted).sum(-1)
    # One-hot rather than a gather: its transpose is a product, not a scatter, and it splits over a sharded vocabulary.
    chosen = jnp.where(targets[..., None] == jnp.arange(logits.shape[-1]), shifted, 0.0).sum(-1)
    correct = jnp.argmax(logits, -1) == targets
    return RowScores(
        jnp.where(wanted, jnp.log(total) - chosen, 0.0),
        jnp.where(wanted, correct, False).astype(jnp.float32),
        jnp.where(wanted, 1 / jax.lax.stop_gradient(total), 0.0),
    )
