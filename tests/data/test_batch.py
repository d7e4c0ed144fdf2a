"""Targets, weights, offsets and denominators against plain loops over the definition."""

import json
from pathlib import Path

import numpy as np
import pytest

from marsjax.attention import masks
from marsjax.data.batch import BatchFormat, align, make_batch
from marsjax.data.rows import Row

MASK, END, PAD = 99, 98, 97


def row(ids, supervised, complete=True):
    return Row(np.array(ids, np.int32), np.array(supervised, bool), complete)


def form(**changes):
    base = {"batch_size": 1, "length": 16, "block_size": 4, "mask_id": MASK, "end_id": END, "pad_id": PAD}
    return BatchFormat(**{**base, **changes})


def reference(ids, supervised, block_size):
    """(target, weight, offset) of every row of one document, read off who may see whom."""
    out = []
    for t in range(len(ids)):
        if t + 1 >= len(ids) or not supervised[t + 1]:
            out.append((0, 0, 0))
            continue
        clean = [j for j in range(len(ids)) if j // block_size < t // block_size]
        own = [j for j in range(len(ids)) if j // block_size == t // block_size and j <= t]
        seen = clean + [j for j in own if not supervised[j]]
        out.append((ids[t + 1], 1, t + 1 - max(seen, default=-1)))
    return out


@pytest.mark.parametrize("size", range(1, 10))
def test_equals_loops_for_every_length_and_span(size):
    rng = np.random.default_rng(size)
    for bits in range(2**size):
        supervised = [bool(bits >> i & 1) for i in range(size)]
        ids = rng.integers(1, 90, size).tolist()
        batch = make_batch([row(ids, supervised)], form(length=12))
        want = reference(ids, supervised, 4) + [(0, 0, 0)] * (12 - size)
        got = list(zip(batch.targets[0], batch.weights[0], batch.offsets[0], strict=True))
        assert got == want
        assert batch.noisy[0, :size].tolist() == [MASK if s else i for i, s in zip(ids, supervised, strict=True)]
        assert batch.denominator[0] == sum(supervised[1:])
        assert batch.segments[0].tolist() == [1] * size + [0] * (12 - size)
        assert batch.positions[0, :size].tolist() == list(range(size))


def test_offsets_agree_with_the_mask_that_attention_uses():
    rng = np.random.default_rng(0)
    for block_size in (2, 3, 4, 8):
        supervised = rng.random(20) < 0.6
        batch = make_batch([row(rng.integers(1, 90, 20), supervised)], form(length=24, block_size=block_size))
        rows = masks.two_stream_rows(batch.positions, batch.segments, block_size)
        seen = masks.dense_mask(masks.two_stream, rows)[0]
        stream = np.concatenate([batch.tokens[0], batch.noisy[0]])
        for t in np.flatnonzero(batch.weights[0]):
            real = [j % 24 for j in np.flatnonzero(seen[24 + t]) if stream[j] != MASK]
            assert batch.offsets[0, t] == t + 1 - max(real, default=-1)


def test_offsets_are_two_to_block_size_plus_one_behind_the_first_block():
    batch = make_batch([row(range(1, 17), [False] * 4 + [True] * 12)], form())
    assert batch.offsets[0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 0]


def test_padding_is_known_by_length_not_by_id():
    """The pad token is a legal token of a message."""
    batch = make_batch([row([5, PAD, 6, PAD, END], [False, False, True, True, True])], form(length=8))
    assert batch.tokens[0].tolist() == [5, PAD, 6, PAD, END, PAD, PAD, PAD]
    assert batch.segments[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert batch.targets[0].tolist() == [0, 6, PAD, END, 0, 0, 0, 0]
    assert batch.weights[0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_sequence_normalisation_counts_documents_without_answers():
    rows = [row([1, 2, 3, 4], [False, True, True, True]), row([1, 2], [False, False])]
    batch = make_batch(rows, form(batch_size=3, length=6, normalisation="sequence"))
    np.testing.assert_allclose(batch.weights.sum(axis=1), [1, 0, 0], rtol=1e-6)
    assert batch.denominator.tolist() == [1, 1, 0]  # the third row is padding
    token = make_batch(rows, form(batch_size=3, length=6))
    assert token.denominator.tolist() == [3, 0, 0]


def test_without_mask_id_the_streams_are_equal():
    batch = make_batch([row([1, 2, 3, 4], [False, True, True, True])], form(mask_id=None))
    assert (batch.noisy == batch.tokens).all()
    assert batch.offsets[0, :4].tolist() == [1, 1, 1, 0]


def test_published_cases_have_their_number_of_supervised_tokens():
    cases = json.loads((Path(__file__).parents[1] / "cases" / "loss_cases.json").read_text())
    for case in cases:
        rows = [
            row(ids, [label != -100 for label in labels])
            for ids, labels in zip(case["tokens"], case["labels"], strict=True)
        ]
        longest = max(len(r.ids) for r in rows)
        batch = make_batch(rows, form(batch_size=len(rows), length=longest, mask_id=case["mask_token"]))
        assert batch.denominator.sum() == batch.weights.sum() == case["supervised"]


def test_last_block_filled_with_end_only_when_asked_and_never_behind_a_cut_answer():
    ids, supervised = [1, 2, 3, 4, 5, END], [False] * 3 + [True] * 3
    plain = make_batch([row(ids, supervised)], form())
    assert plain.segments.sum() == 6
    filled = make_batch([row(ids, supervised)], form(fill_last_block_with_end=True))
    assert filled.tokens[0, :9].tolist() == [*ids, END, END, PAD]
    assert filled.denominator[0] == 5
    cut = make_batch([row([1, 2, 3, 4, 5], [False] * 3 + [True] * 2, complete=False)],
                     form(fill_last_block_with_end=True))  # fmt: skip
    assert cut.segments.sum() == 5
    limited = make_batch([row(ids, supervised)], form(fill_last_block_with_end=True, length=7))
    assert limited.segments.sum() == 7


def test_several_documents_in_a_row_do_not_meet():
    """The arrays a packer would hand over: the second document starts at row 4."""
    a = ([7, 8, 9], [False, True, True])
    b = ([4, 5, 6, 3, 2], [True, False, True, True, True])
    tokens = np.array([[*a[0], PAD, *b[0], PAD]], np.int32)
    supervised = np.array([[*a[1], False, *b[1], False]])
    segments = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 2, 0]], np.int32)
    positions = np.array([[0, 1, 2, 0, 0, 1, 2, 3, 4, 0]], np.int32)
    got = align(tokens, supervised, positions, segments, form(normalisation="sequence", length=10))
    none = [(0, 0, 0)]
    want = reference(*a, 4) + none + reference(*b, 4) + none
    assert [(t, o) for t, _, o in want] == list(zip(got.targets[0], got.offsets[0], strict=True))
    np.testing.assert_allclose(got.weights[0], [0.5, 0.5, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0], rtol=1e-6)
    assert got.denominator[0] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"block_size": 2.0}, r"block_size must be an integer of at least 1, got 2\.0"),
        ({"normalisation": "mean"}, "normalisation must be 'token' or 'sequence', got 'mean'"),
    ],
)
def test_refuses_bad_formats(changes, message):
    with pytest.raises(ValueError, match=message):
        form(**changes)


def test_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match="2 rows do not fit a batch of 1"):
        make_batch([row([1], [False])] * 2, form())
    with pytest.raises(ValueError, match="17 tokens does not fit batches of length 16"):
        make_batch([row([1] * 17, [False] * 17)], form())
