"""Batches: everything about alignment is resolved here, so that objectives only gather and sum.

The layout is that of MARS training (arXiv 2604.07023, section 3): a clean and a noisy stream, both shifted right, so
that row t predicts token t+1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from marsjax.data.rows import Row, fill_last_block

Normalisation = Literal["token", "sequence"]


class Batch(NamedTuple):
    """N rows of L tokens; a pytree of numpy (or, on a device, jax) arrays.

    The loss of an objective is `sum(weights * cross_entropy) / sum(denominator)`, numerators and denominators summed
    over accumulation and data parallelism first. Both streams use the same weights.
    """

    tokens: Any  # [N, L] int32    clean stream
    noisy: Any  # [N, L] int32    every supervised token replaced by the mask id (== tokens without a mask id)
    positions: Any  # [N, L] int32    from 0 at each document's start
    segments: Any  # [N, L] int32    0 = padding, documents counted from 1
    targets: Any  # [N, L] int32    token that row t predicts; 0 where the weight is 0
    weights: Any  # [N, L] float32  1 ("token") or 1 / predicted tokens of the document ("sequence"); 0 = none
    offsets: Any  # [N, L] int32    from the last real token that noisy row t sees to its target; 0 where weight is 0
    denominator: Any  # [N] float32     the row's predicted tokens ("token") or documents ("sequence")


@dataclass(frozen=True)
class BatchFormat:
    """How rows become batches.

    `mask_id` None leaves the noisy stream equal to the clean one (AR fine-tuning). `fill_last_block_with_end` pads a
    document's last block with *supervised* end tokens, as the paper's published code does; never after a cut answer.
    """

    batch_size: int
    length: int
    block_size: int
    mask_id: int | None
    end_id: int
    pad_id: int = 0  # any legal id: padding is known by segment 0
    normalisation: Normalisation = "token"
    fill_last_block_with_end: bool = False

    @property
    def filled_block(self) -> int | None:
        return self.block_size if self.fill_last_block_with_end else None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("length", 2), ("block_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.normalisation not in ("token", "sequence"):
            raise ValueError(f"normalisation must be 'token' or 'sequence', got {self.normalisation!r}")


def make_batch(rows: Sequence[Row | Sequence[Row]], form: BatchFormat, size: int | None = None) -> Batch:
    """Up to `size` (None: `batch_size`) rows of one document, or of several, each at a multiple of the block size.

    Rows are padded on the right; missing rows are padding throughout.
    """
    size = form.batch_size if size is None else size
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {size}")
    shape = (size, form.length)
    tokens = np.full(shape, form.pad_id, np.int32)
    supervised = np.zeros(shape, bool)
    segments = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    for n, content in enumerate(rows):
        documents = [content] if isinstance(content, Row) else content
        start = 0
        for number, document in enumerate(documents, start=1):
            if form.filled_block is not None:
                document = fill_last_block(document, form.filled_block, form.end_id, form.length - start)
            end = start + len(document.ids)
            if end > form.length:
                raise ValueError(f"a row of {end} tokens does not fit batches of length {form.length}")
            tokens[n, start:end] = document.ids
            supervised[n, start:end] = document.supervised
            segments[n, start:end] = number
            positions[n, start:end] = np.arange(len(document.ids))
            start = -(-end // form.block_size) * form.block_size
    return align(tokens, supervised, positions, segments, form)


def align(
    tokens: np.ndarray, supervised: np.ndarray, positions: np.ndarray, segments: np.ndarray, form: BatchFormat
) -> Batch:
    """Targets, weights and offsets of rows that hold any number of documents each (all arrays [N, L])."""
    predicts = np.zeros_like(supervised)
    predicts[:, :-1] = supervised[:, 1:] & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    targets = np.zeros_like(tokens)
    targets[:, :-1] = np.where(predicts[:, :-1], tokens[:, 1:], 0)

    documents = segments.max(axis=1)
    per_document = np.zeros((len(tokens), documents.max(initial=0) + 1), np.int64)
    np.add.at(per_document, (np.arange(len(tokens))[:, None], segments), predicts)
    if form.normalisation == "token":
        weights = predicts.astype(np.float32)
        denominator = predicts.sum(axis=1).astype(np.float32)
    else:
        share = 1.0 / np.maximum(per_document, 1)
        weights = np.where(predicts, np.take_along_axis(share, segments, axis=1), 0).astype(np.float32)
        denominator = documents.astype(np.float32)

    # A noisy row sees real tokens before its block, and in its block those that are not masked.
    masked = supervised if form.mask_id is not None else np.zeros_like(supervised)
    index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    before_block = index - positions % form.block_size - 1
    unmasked = np.maximum.accumulate(np.where(masked, -1, index), axis=1)
    offsets = np.where(predicts, index + 1 - np.maximum(before_block, unmasked), 0).astype(np.int32)

    noisy = tokens if form.mask_id is None else np.where(supervised, np.int32(form.mask_id), tokens)
    return Batch(tokens, noisy, positions, segments, targets, weights, offsets, denominator)
