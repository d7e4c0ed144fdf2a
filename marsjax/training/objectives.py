"""The losses of MARS (arXiv 2604.07023, section 3) and of plain fine-tuning, as sums that are divided later.

Batches are aligned already (`marsjax.data.batch`): row t of either stream predicts `targets[t]` with `weights[t]`.
Objectives return numerators and denominators apart, so that accumulation and data parallelism add both and divide once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.attention.masks import CLEAN, NOISY, single_stream_rows, stream_rows
from marsjax.models.decoder import Decoder
from marsjax.training.attend import Attention, causal_attend, two_stream_attend
from marsjax.training.losses import DEFAULT_CHUNK_BYTES, RowScores, score_rows


@dataclass(frozen=True)
class Forward:
    """How the network is run, whatever the objective; static under jit.

    dtype: compute dtype (weights stay float32). remat: a `jax.checkpoint_policies` name, or None to keep every
    activation. chunk_bytes: bound on one chunk of logits. attention: see `two_stream_attend`.
    """

    dtype: Any = jnp.float32
    remat: str | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    attention: Attention = "blocks"


class Sums(NamedTuple):
    """What is added over rows, microbatches and devices. loss = numerator / denominator; terms likewise."""

    numerator: jax.Array
    denominator: jax.Array
    terms: dict[str, jax.Array]


class TwoStreams(NamedTuple):
    """Scores of both streams: clean [N, L]; noisy [N, M], whose rows stand at columns `rows` [N, M] of the batch."""

    clean: RowScores
    noisy: RowScores
    rows: jax.Array


def sft(model: Decoder, batch: Any, forward: Forward = Forward()) -> Sums:
    """Next-token cross-entropy of the supervised tokens, one causal pass over L rows."""
    scores = score_clean(model, batch, forward)
    total = (batch.weights * scores.cross_entropy).sum()
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

    `ar_weight` may be traced; the Python number 0 leaves the head of the clean rows out.
    `noisy_length`: see `score_two_streams`.
    """
    with_ar = not (isinstance(ar_weight, int | float) and ar_weight == 0)
    scores = score_two_streams(
        model, batch, block_size=block_size, noisy_length=noisy_length, score_clean=with_ar, forward=forward
    )
    mask = (jnp.take_along_axis(batch.weights, scores.rows, axis=1) * scores.noisy.cross_entropy).sum()
    terms = {"mask": mask}
    total = mask
    if with_ar:
        terms["ar"] = (batch.weights * scores.clean.cross_entropy).sum()
        total = mask + ar_weight * terms["ar"]
    return Sums(total, batch.denominator.sum(), terms)


def score_clean(model: Decoder, batch: Any, forward: Forward) -> RowScores:
    """Scores [N, L] of the supervised rows of the clean stream alone."""
    rows = single_stream_rows(batch.positions, batch.segments)
    hidden, _ = model(
        batch.tokens, positions=batch.positions, attend=causal_attend(rows), dtype=forward.dtype, remat=forward.remat
    )
    return _head(model, hidden, batch.targets, batch.weights != 0, forward)


def score_two_streams(
    model: Decoder,
    batch: Any,
    *,
    block_size: int,
    noisy_length: int | None = None,
    score_clean: bool = True,
    forward: Forward = Forward(),
) -> TwoStreams:
    """Scores of the supervised rows of both streams.

    Noisy rows are seen by their own block only, so blocks without a supervised row are left out: of each sequence the
    first `noisy_length` rows of the blocks that have one are computed. It must be a multiple of `block_size` and at
    least `needed_noisy_length(batch)`; None takes all L.
    """
    n, length = batch.tokens.shape
    rows = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (n, length))
    if noisy_length is not None and noisy_length < length:
        rows = _rows_of_needed_blocks(batch.weights, block_size, noisy_length)

    def take(x):
        return jnp.take_along_axis(x, rows, axis=1)

    position = take(batch.positions)
    clean = stream_rows(CLEAN, batch.positions, batch.segments, block_size)
    noisy = stream_rows(NOISY, position, take(batch.segments), block_size)
    hidden, _ = model(
        jnp.concatenate([batch.tokens, take(batch.noisy)], axis=1),
        positions=jnp.concatenate([batch.positions, position], axis=1),
        attend=two_stream_attend(clean, noisy, block_size, forward.attention),
        dtype=forward.dtype,
        remat=forward.remat,
    )
    wanted = batch.weights != 0
    scores = _head(
        model,
        hidden,
        jnp.concatenate([batch.targets, take(batch.targets)], axis=1),
        jnp.concatenate([wanted & score_clean, take(wanted)], axis=1),
        forward,
    )
    clean_scores, noisy_scores = (
        RowScores(*parts) for parts in zip(*(jnp.split(x, [length], axis=1) for x in scores), strict=True)
    )
    return TwoStreams(clean_scores, noisy_scores, rows)


def _head(model: Decoder, hidden, targets, wanted, forward: Forward) -> RowScores:
    return score_rows(
        model.unembed, hidden, targets, wanted, vocab_size=model.config.vocab_size, chunk_bytes=forward.chunk_bytes
    )


def _blocks(weights, block_size: int, xp: Any):
    """Whether each run of `block_size` columns has a supervised row: [N, ceil(L / B)] bool."""
    n, length = weights.shape
    padded = xp.pad(weights != 0, ((0, 0), (0, -length % block_size)))
    return padded.reshape(n, -1, block_size).any(-1)


def _rows_of_needed_blocks(weights, block_size: int, noisy_length: int):
    length = weights.shape[1]
    order = jnp.argsort(~_blocks(weights, block_size, jnp), axis=1, stable=True)[:, : noisy_length // block_size]
    rows = (order[..., None] * block_size + jnp.arange(block_size)).reshape(weights.shape[0], -1)
    # Where L is no multiple of B the last block reaches past the end and repeats row L-1, which predicts nothing and
    # is seen by no other row.
    return jnp.minimum(rows, length - 1).astype(jnp.int32)


def needed_noisy_length(batch: Any, block_size: int, parts: int = 8) -> int:
    """On the host: the noisy rows a batch needs, rounded up to a `parts`-th of L so that few programs are compiled."""
    length = batch.weights.shape[-1]
    weights = np.asarray(batch.weights).reshape(-1, length)
    needed = int(_blocks(weights, block_size, np).sum(-1).max()) * block_size
    step = max(block_size, length // parts // block_size * block_size)
    return min(length, max(step, -(-needed // step) * step))


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
