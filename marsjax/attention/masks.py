"""Who sees whom in training, as arithmetic on four integers a row. The only place where that mask is defined.

A row of the attention input is described by its stream, its position in its document, its block (`position // B`; of
`multi_token` see there) and its segment (the document it belongs to within a packed row; 0 is padding). The functions
work on numpy and jax arrays alike and broadcast, so that the dense path, the tests and a kernel's computable mask use
the same lines.
"""

from typing import Any, NamedTuple

import numpy as np

CLEAN, NOISY = 0, 1


class Rows(NamedTuple):
    """Integers that describe attention rows; arrays of any shapes that broadcast."""

    stream: Any
    position: Any
    block: Any
    segment: Any


def _same_document(query: Rows, key: Rows):
    return (query.segment == key.segment) & (key.segment != 0)


def causal(query: Rows, key: Rows):
    """Rows see earlier rows of their own document, and themselves."""
    return _same_document(query, key) & (key.position <= query.position)


def two_stream(query: Rows, key: Rows):
    """The mask of MARS training (arXiv 2604.07023, section 3; causal in both streams).

    query \\ key   clean                    noisy
    clean         position ≤              never
    noisy         block <                 same block, position ≤
    """
    clean_clean = (query.stream == CLEAN) & (key.stream == CLEAN) & (key.position <= query.position)
    noisy_clean = (query.stream == NOISY) & (key.stream == CLEAN) & (key.block < query.block)
    noisy_noisy = (
        (query.stream == NOISY) & (key.stream == NOISY) & (key.block == query.block) & (key.position <= query.position)
    )
    return _same_document(query, key) & (clean_clean | noisy_clean | noisy_noisy)


def block_diffusion(query: Rows, key: Rows):
    """The mask of block diffusion training (arXiv 2503.09573, section 3; the baseline of arXiv 2604.07023).

    query \\ key   clean                    noisy
    clean         block ≤                 never
    noisy         block <                 same block
    """
    clean_clean = (query.stream == CLEAN) & (key.stream == CLEAN) & (key.block <= query.block)
    noisy_clean = (query.stream == NOISY) & (key.stream == CLEAN) & (key.block < query.block)
    noisy_noisy = (query.stream == NOISY) & (key.stream == NOISY) & (key.block == query.block)
    return _same_document(query, key) & (clean_clean | noisy_clean | noisy_noisy)


def multi_token(query: Rows, key: Rows):
    """The mask of multi-token training in one pass (arXiv 2507.11851): k masks behind each of many anchors.

    The block of a row is the position of its anchor, of a clean row its own (`masks_behind_rows`).

    query \\ key   clean                    masks
    clean         position ≤              never
    masks         up to the anchor        same anchor, position ≤
    """
    clean_clean = (query.stream == CLEAN) & (key.stream == CLEAN) & (key.position <= query.position)
    masks_clean = (query.stream == NOISY) & (key.stream == CLEAN) & (key.block <= query.block)
    masks_masks = (
        (query.stream == NOISY) & (key.stream == NOISY) & (key.block == query.block) & (key.position <= query.position)
    )
    return _same_document(query, key) & (clean_clean | masks_clean | masks_masks)


def masks_behind_rows(anchors, segments, k: int, xp: Any = np) -> Rows:
    """Rows of k masks behind each anchor, [N, A k]; anchors (positions) and their segments [N, A]."""
    anchor, segment = xp.repeat(anchors, k, axis=-1), xp.repeat(segments, k, axis=-1)
    behind = xp.tile(xp.arange(1, k + 1), anchors.shape[-1])
    return Rows(NOISY + 0 * anchor, anchor + behind, anchor, segment)


def single_stream_rows(positions, segments) -> Rows:
    """Rows of plain causal attention. positions, segments [N, L]."""
    return Rows(CLEAN + 0 * positions, positions, 0 * positions, segments)


def stream_rows(stream: int, positions, segments, block_size: int) -> Rows:
    """Rows of one stream of MARS training, CLEAN or NOISY. positions, segments [N, L]."""
    return Rows(stream + 0 * positions, positions, positions // block_size, segments)


def joined(first: Rows, second: Rows, xp: Any = np) -> Rows:
    """`[first | second]`, one behind the other in each sequence."""
    return Rows(*(xp.concatenate(fields, axis=-1) for fields in zip(first, second, strict=True)))


def two_stream_rows(positions, segments, block_size: int, xp: Any = np) -> Rows:
    """Rows of `[clean | noisy]`, each [N, 2L], from positions and segments [N, L]."""
    clean, noisy = (stream_rows(stream, positions, segments, block_size) for stream in (CLEAN, NOISY))
    return joined(clean, noisy, xp)


def dense_mask(rule, query: Rows, key: Rows | None = None):
    """The [N, Q, T] boolean array of a rule, for dense attention on short sequences and for tests.

    Fields of `query` are [N, Q], of `key` [N, T]; without `key` the rows attend to themselves.
    """
    key = query if key is None else key
    return rule(Rows(*(f[..., :, None] for f in query)), Rows(*(f[..., None, :] for f in key)))
