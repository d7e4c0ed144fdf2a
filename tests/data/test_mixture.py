"""Mixtures: proportions, each row at most once, an order that is fixed; sizes of what is mixed."""

import grain
import numpy as np
import pytest

from marsjax.data.batch import BatchFormat
from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.loading import load_rows
from marsjax.data.mixture import MixedRows
from marsjax.data.pipeline import TrainBatches
from marsjax.data.row_sets import sizes_of
from marsjax.data.sources import DataError

TOKENIZER = demo_tokenizer()


def conversations(word, count):
    answer = f"{word}. " * 3
    return [
        [{"role": "user", "content": f"{word} {i}"}, {"role": "assistant", "content": f"{i} {answer[: 1 + i % 9]}"}] * 2
        for i in range(count)
    ]


def mixed(counts, weights):
    """Sets of the given numbers of rows, called a, b, ..., mixed by the weights."""
    names = "abcdef"[: len(counts)]
    sets = {n: load_rows(conversations(n, count), TOKENIZER, length=64) for n, count in zip(names, counts, strict=True)}
    return MixedRows(sets, dict(zip(names, weights, strict=True))), list(sets.values())


@pytest.mark.parametrize(
    ("counts", "weights", "length"),
    [
        ((70, 30), (0.7, 0.3), 100),
        ((700, 10), (0.7, 0.3), 33),
        ((13, 50, 21), (1, 1, 1), 39),
        ((5,), (3,), 5),
        ((9, 40, 7), (0.2, 5, 1e-1), 42),
        ((30, 40), (0.123456789, 0.2), 64),
    ],
)
def test_proportions_hold_everywhere_and_no_row_is_given_twice(counts, weights, length):
    rows, _ = mixed(counts, weights)
    assert len(rows) == length
    source, row = rows.locate(np.arange(length))
    share = np.array(weights) / sum(weights)
    for n in range(1, length + 1):
        given = np.bincount(source[:n], minlength=len(counts))
        assert (abs(given - n * share) < len(counts)).all()
    assert len(set(zip(source, row, strict=True))) == length
    assert all(0 <= r < counts[s] for s, r in zip(source, row, strict=True))
    assert list(rows.counts.values()) == np.bincount(source, minlength=len(counts)).tolist()


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2, 1), (1, 1, 2), (4, 2, 1)])
def test_the_order_is_grains(weights):
    sources = [grain.MapDataset.range(1000 * i, 1000 * i + 400) for i in range(len(weights))]
    theirs = grain.MapDataset.mix(sources, weights)
    rows, _ = mixed([400] * len(weights), weights)
    assert [int(rows.locate(i)[0]) for i in range(90)] == [theirs[i] // 1000 for i in range(90)]


def test_a_part_is_taken_from_all_over_a_set():
    rows, _ = mixed((300, 30), (1, 1))
    source, row = rows.locate(np.arange(len(rows)))
    used = np.sort(row[source == 0])
    assert len(used) == 30
    assert np.diff(used, prepend=0, append=300).max() <= 30


def test_rows_and_sizes_are_those_of_the_sets():
    rows, sets = mixed((20, 8), (1, 3))
    source, row = rows.locate(np.arange(len(rows)))
    expected = [sets[s][r] for s, r in zip(source, row, strict=True)]
    for found, want in zip((rows[i] for i in range(len(rows))), expected, strict=True):
        assert found is want
    for got, want in zip(rows.sizes(), sizes_of(expected), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    with pytest.raises(IndexError, match="row 10 of 10 of mixture of a"):
        rows[10]


def test_sizes_say_where_rows_are_supervised():
    rows = load_rows(conversations("a", 5), TOKENIZER, length=64)
    sizes = rows.sizes()
    assert [a.dtype for a in sizes] == [np.int32, np.int32, np.int32, np.int64]
    for i, row in enumerate(rows):
        supervised = np.zeros(sizes.tokens[i], bool)
        spans = slice(*sizes.span_offsets[i : i + 2])
        assert len(sizes.span_starts[spans]) == 2
        for start, end in zip(sizes.span_starts[spans], sizes.span_ends[spans], strict=True):
            supervised[start:end] = True
        np.testing.assert_array_equal(supervised, row.supervised)
    with pytest.raises(DataError, match=r"problems:train has no count.*problems:train,count=10000"):
        load_rows("problems:train", TOKENIZER, length=128).sizes()


def test_a_mapping_is_loaded_and_its_order_means_nothing():
    first = {"problems:train,count=40": 0.5, "problems:train,seed=1,count=90": 1}
    rows = load_rows(first, TOKENIZER, length=96)
    again = load_rows(dict(reversed(first.items())), TOKENIZER, length=96)
    assert rows.fingerprint == again.fingerprint
    assert all((rows[i].ids == again[i].ids).all() for i in range(len(rows)))
    assert (
        rows.name
        == "mixture of problems:train,count=40 (40 of 40 rows), problems:train,seed=1,count=90 (80 of 90 rows)"
    )
    assert rows.stats.conversations == 130
    assert rows.counted
    other = load_rows({**first, "problems:train,count=40": 0.4}, TOKENIZER, length=96)
    assert other.fingerprint != rows.fingerprint
    form = BatchFormat(8, 96, 4, mask_id=512, end_id=TOKENIZER.eos_token_id)
    batches = TrainBatches(rows, form, seed=0, epochs=1)
    assert len(list(batches)) == len(rows) // 8
    endless = load_rows({"problems:train": 1, "problems:train,count=40": 1}, TOKENIZER, length=96)
    assert not endless.counted


def test_bad_mixtures_are_named():
    with pytest.raises(DataError, match="the weight of problems:train must be a number above 0, got -1"):
        load_rows({"problems:train": -1}, TOKENIZER, length=96)
    with pytest.raises(DataError, match=r"no such data file: absent\.jsonl"):
        load_rows({"problems:train,count=3": 1, "absent.jsonl": 1}, TOKENIZER, length=96)
    with pytest.raises(DataError, match="needs at least one source"):
        load_rows({}, TOKENIZER, length=96)
