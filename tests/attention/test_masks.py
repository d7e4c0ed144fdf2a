"""Masks against double loops written from the table of the method (arXiv 2604.07023, section 3)."""

import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.attention.masks import (
    CLEAN,
    Rows,
    block_diffusion,
    causal,
    dense_mask,
    joined,
    masks_behind_rows,
    multi_token,
    single_stream_rows,
    stream_rows,
    two_stream,
    two_stream_rows,
)


def packed(lengths, total):
    """(positions, segments) of documents of these lengths in one row, padding at the end."""
    positions, segments = np.zeros((1, total), np.int32), np.zeros((1, total), np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        positions[0, start : start + length] = np.arange(length)
        segments[0, start : start + length] = number
        start += length
    return positions, segments


def brute_force(positions, segments, block_size):
    length = len(positions)
    allowed = np.zeros((2 * length, 2 * length), bool)
    for query in range(2 * length):
        for key in range(2 * length):
            i, j = query % length, key % length
            if segments[i] == 0 or segments[i] != segments[j]:
                continue
            query_block, key_block = positions[i] // block_size, positions[j] // block_size
            if query < length and key < length:
                allowed[query, key] = positions[j] <= positions[i]
            elif query >= length and key < length:
                allowed[query, key] = key_block < query_block
            elif query >= length and key >= length:
                allowed[query, key] = key_block == query_block and positions[j] <= positions[i]
    return allowed


LENGTHS = [*([n] for n in range(1, 10)), [3, 5], [4, 4, 1], [8, 2, 6], [1, 1, 1]]


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_two_stream(lengths, block_size, xp):
    positions, segments = packed(lengths, 16)
    rows = two_stream_rows(xp.asarray(positions), xp.asarray(segments), block_size, xp)
    mask = np.asarray(dense_mask(two_stream, rows))
    np.testing.assert_array_equal(mask[0], brute_force(positions[0], segments[0], block_size))


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_block_diffusion(lengths, block_size, xp):
    positions, segments = packed(lengths, 16)
    rows = two_stream_rows(xp.asarray(positions), xp.asarray(segments), block_size, xp)
    mask = np.asarray(dense_mask(block_diffusion, rows))[0]
    for query in range(32):
        for key in range(32):
            i, j = query % 16, key % 16
            at, other = positions[0, i] // block_size, positions[0, j] // block_size
            of_clean, of_noisy = (key < 16 and other <= at), (other < at if key < 16 else other == at)
            allowed = of_clean if query < 16 else of_noisy
            assert mask[query, key] == (allowed and segments[0, i] == segments[0, j] != 0), (query, key)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal(lengths):
    positions, segments = packed(lengths, 16)
    mask = dense_mask(causal, single_stream_rows(positions, segments))[0]
    for i in range(16):
        for j in range(16):
            same = segments[0, i] != 0 and segments[0, i] == segments[0, j]
            assert mask[i, j] == (same and positions[0, j] <= positions[0, i])


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_multi_token(lengths, k, xp):
    """Row 16 + a k + j: mask j + 1 behind anchor a. Every other column is one, and the last is of padding."""
    positions, segments = packed(lengths, 16)
    columns = np.r_[0:14:2, 15]
    clean = stream_rows(CLEAN, xp.asarray(positions), xp.asarray(segments), 1)
    masks = masks_behind_rows(*(xp.asarray(x[:, columns]) for x in (positions, segments)), k, xp)
    mask = np.asarray(dense_mask(multi_token, joined(clean, masks, xp)))[0]

    def at(row):  # the column where the row stands, or its anchor does
        return row if row < 16 else columns[(row - 16) // k]

    assert mask.shape == (16 + 8 * k,) * 2
    for query, key in np.ndindex(mask.shape):
        own = query >= 16 and at(query) == at(key) and key <= query
        allowed = key <= at(query) if key < 16 else own
        same = segments[0, at(query)] == segments[0, at(key)] != 0
        assert mask[query, key] == (allowed and same), (query, key)
    ranks = np.asarray(masks.position - masks.block)[0]
    np.testing.assert_array_equal(ranks, [1 + j for _ in columns for j in range(k)])


def test_a_quarter_of_the_square():
    positions, segments = packed([512], 512)
    mask = dense_mask(two_stream, two_stream_rows(positions, segments, 4))
    assert mask.sum() == 512 * 513 // 2 + 128 * (127 * 4 * 4) // 2 + 128 * 10
    assert 0.25 <= mask.mean() < 0.253


def test_single_rows_need_no_arrays():
    assert two_stream(Rows(1, 5, 1, 1), Rows(0, 3, 0, 1))
    assert not two_stream(Rows(1, 5, 1, 1), Rows(0, 4, 1, 1))
