"""The losses of MARS (arXiv 2604.07023, section 3) and of plain fine-tuning, as sums that are divided later.

Batches are aligned already (`marsjax.data.batch`): row t of either stream predicts `targets[t]` with `weights[t]`.
Objectives return numerators and denominators apart, so that accumulation and data parallelism add both and divide once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.attention.masks import CLEAN, NOISY, single_stream_rows, stream_rows, two_stream
from marsjax.models.decoder import Decoder
from marsjax.models.layers import Gate
from marsjax.training.attend import Attention, causal_attend, two_stream_attend
from marsjax.training.losses import DEFAULT_CHUNK_BYTES, RowScores, score_rows


@dataclass(frozen=True)
class Forward:
    """How the network is run, whatever the objective; static under jit.

    dtype: compute dtype (weights stay float32). remat: a `jax.checkpoint_policies` name, or None to keep every
    activation. chunk_bytes: bound on one chunk of logits. attention, interpret: see `two_stream_attend`.
    """

    dtype: Any = jnp.float32
    remat: str | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    attention: Attention = "blocks"
    interpret: bool | None = None


class Sums(NamedTuple):
    """What is added over rows, microbatches and devices. loss = numerator / denominator; terms likewise."""

    numerator: jax.Array
    denominator: jax.Array
    terms: dict[str, jax.Array]


class Scored(NamedTuple):
    """Rows of a stream that the head looks at, both [N, L]: `wanted` bool, `weights` float32 of their loss."""

    wanted: jax.Array
    weights: jax.Array


class TwoStreams(NamedTuple):
    """`total`: the weighted sum of both streams' cross-entropies, the one field with gradients. Scores of both streams
    [N, M], of the rows that stand at columns `rows` [N, M] of the batch; `clean` is None where it was left out."""

    total: jax.Array
    clean: RowScores | None
    noisy: RowScores
    rows: jax.Array


def sft(model: Decoder, batch: Any, *, target_rows: int | None = None, forward: Forward = Forward()) -> Sums:
    """Next-token cross-entropy of the supervised tokens, one causal pass over L rows.

    `target_rows`: rows of a sequence that reach the head, at least those with a target; None: all L.
    """
    total, _ = score_clean(model, batch, target_rows, forward)
    return Sums(total, batch.denominator.sum(), {"ar": total})


def mars(
    model: Decoder,
    batch: Any,
    *,
    block_size: int,
    ar_weight: float | jax.Array = 1.0,
    noisy_length: int | None = None,
    forward: Forward = Forward(),
) -> Sums:
    """L_mask + ar_weight · L_AR from one pass over `[clean | noisy]`.

    `ar_weight` may be traced; the Python number 0 leaves the head of the clean rows out, as a gated adapter does, under
    which L_AR is a constant.
    `noisy_length`: see `score_two_streams`.
    """
    wanted = batch.weights != 0
    adapter = model.config.adapter
    frozen = adapter is not None and adapter.gated  # then L_AR is a constant
    with_ar = not (frozen or (isinstance(ar_weight, int | float) and ar_weight == 0))
    scores = score_two_streams(
        model,
        batch,
        block_size=block_size,
        noisy_length=noisy_length,
        clean=Scored(wanted, ar_weight * batch.weights) if with_ar else None,
        noisy=Scored(wanted, batch.weights),
        forward=forward,
    )
    if scores.clean is None:
        return Sums(scores.total, batch.denominator.sum(), {"mask": scores.total})
    weights = jnp.take_along_axis(batch.weights, scores.rows, axis=1)
    of_each = {"mask": scores.noisy, "ar": scores.clean}
    terms = {name: (weights * one.cross_entropy).sum() for name, one in of_each.items()}
    return Sums(scores.total, batch.denominator.sum(), terms)


def score_clean(model: Decoder, batch: Any, target_rows: int | None, forward: Forward) -> tuple[jax.Array, RowScores]:
    """(total, scores [N, L]) of the supervised rows of the clean stream alone; with `target_rows`, [N, target_rows]."""
    stream = single_stream_rows(batch.positions, batch.segments)
    attend = causal_attend(stream, forward.attention, interpret=forward.interpret)
    hidden, _ = model(batch.tokens, positions=batch.positions, attend=attend, dtype=forward.dtype, remat=forward.remat)
    rows = target_columns(batch, 1, target_rows)
    return _head(model, take(hidden, rows), take(batch.targets, rows), _all(batch, rows), forward)


def score_two_streams(
    model: Decoder,
    batch: Any,
    *,
    block_size: int,
    noisy_length: int | None = None,
    noisy_tokens: jax.Array | None = None,
    rule: Callable = two_stream,
    clean: Scored | None,
    noisy: Scored,
    forward: Forward = Forward(),
) -> TwoStreams:
    """Scores of both streams, of the rows that `clean` and `noisy` want; None leaves the clean stream's head out.

    `noisy_tokens` [N, L]: that stream, by default `batch.noisy`. `rule`: see `two_stream_attend`.

    Noisy rows are seen by their own block only, so blocks without a target are left out: of each sequence the first
    `noisy_length` rows of the blocks that have one are computed, and no others reach the head, of either stream. It
    must be a multiple of `block_size` and enough (`TrainBatches.target_rows`); None takes all L.
    """
    length = batch.tokens.shape[1]
    rows = target_columns(batch, block_size, noisy_length)
    # Where L is no multiple of B the last block reaches past the end: row L-1 stands there, which predicts nothing, as
    # padding, which nobody sees.
    beyond = rows >= length
    rows = jnp.minimum(rows, length - 1)
    position = take(batch.positions, rows)
    clean_rows = stream_rows(CLEAN, batch.positions, batch.segments, block_size)
    noisy_rows = stream_rows(NOISY, position, jnp.where(beyond, 0, take(batch.segments, rows)), block_size)
    noisy_tokens = take(batch.noisy if noisy_tokens is None else noisy_tokens, rows)
    is_mask = noisy_tokens != take(batch.tokens, rows)  # no text holds a mask
    what: dict[str, Any] = {"tokens": jnp.concatenate([batch.tokens, noisy_tokens], axis=1)}
    if model.masks is not None:  # then the id of a mask is none of the table's
        real = model.embed(jnp.where(is_mask, 0, noisy_tokens), forward.dtype)
        own = jnp.where(is_mask[..., None], model.masks(0, forward.dtype), real)
        what = {"embeddings": jnp.concatenate([model.embed(batch.tokens, forward.dtype), own], axis=1)}
    hidden, _ = model(
        **what,
        positions=jnp.concatenate([batch.positions, position], axis=1),
        attend=two_stream_attend(
            clean_rows, noisy_rows, block_size, forward.attention, rule, columns=rows, interpret=forward.interpret
        ),
        gate=Gate(length + rows.shape[1], rows.shape[1], is_mask),
        dtype=forward.dtype,
        remat=forward.remat,
    )
    of_noisy, targets = hidden[:, length:], take(batch.targets, rows)
    noisy = Scored(*(take(x, rows) for x in noisy))
    if clean is None:
        total, scores = _head(model, of_noisy, targets, noisy, forward)
        return TwoStreams(total, None, scores, rows)
    both = Scored(*(jnp.concatenate([take(c, rows), n], axis=1) for c, n in zip(clean, noisy, strict=True)))
    hidden = jnp.concatenate([take(hidden[:, :length], rows), of_noisy], axis=1)
    total, scores = _head(model, hidden, jnp.concatenate([targets, targets], axis=1), both, forward)
    first, second = (RowScores(*half) for half in zip(*(jnp.split(x, 2, axis=1) for x in scores), strict=True))
    return TwoStreams(total, first, second, rows)


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows [N, M] of x [N, L, ...]."""
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *(1,) * (x.ndim - 2)), axis=1)


def _all(batch: Any, rows: jax.Array) -> Scored:
    weights = take(batch.weights, rows)
    return Scored(weights != 0, weights)


def _head(model: Decoder, hidden, targets, scored: Scored, forward: Forward) -> tuple[jax.Array, RowScores]:
    trains = model.config.adapter is None
    return score_rows(
        *model.head_kernel, hidden, targets, *scored, train_kernel=trains, chunk_bytes=forward.chunk_bytes
    )


def target_columns(batch: Any, block_size: int, count: int | None) -> jax.Array:
    """Columns [N, count] of the runs of `block_size` rows that have a target, then of others; all L where count is
    None. They may reach past L - 1 where L is no multiple of the block size."""
    n, length = batch.weights.shape
    if count is None or count >= length:
        return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (n, length))
    chosen = jnp.argsort(~_blocks(batch.weights, block_size, jnp), axis=1, stable=True)[:, : count // block_size]
    # Ascending: a kernel may then leave out tiles that no choice of blocks reaches.
    chosen = jnp.sort(chosen, axis=1)
    return (chosen[..., None] * block_size + jnp.arange(block_size)).reshape(n, -1).astype(jnp.int32)


def _blocks(weights, block_size: int, xp: Any):
    """Whether each run of `block_size` columns has a supervised row: [N, ceil(L / B)] bool."""
    n, length = weights.shape
    padded = xp.pad(weights != 0, ((0, 0), (0, -length % block_size)))
    return padded.reshape(n, -1, block_size).any(-1)


def check_aligned(batch: Any, block_size: int) -> None:
    """On the host: raise ValueError when a document does not start at a multiple of `block_size` in its row."""
    positions, segments = np.asarray(batch.positions), np.asarray(batch.segments)
    off = (segments != 0) & ((np.arange(positions.shape[-1]) - positions) % block_size != 0)
    if off.any():
        row, column = np.argwhere(off.reshape(-1, off.shape[-1]))[0]
        raise ValueError(
            f"row {row}, column {column}: a document does not start at a multiple of block_size={block_size}; "
            f"pack with that alignment, or set compute.attention=dense"
        )
