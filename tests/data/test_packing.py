"""Packing: both capacities, every document once, the same on every host; what is refused, with numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marsjax.data.batch import BatchFormat
from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.packing import demand, pack
from marsjax.data.pipeline import TrainBatches, load_rows
from marsjax.data.row_sets import Sizes, supervised_runs
from marsjax.training.config import ConfigError
from marsjax.training.config_text import load_config
from marsjax.training.setup import pack_rows


def sizes_of(documents) -> Sizes:
    """documents: bool arrays, True where supervised."""
    runs = [supervised_runs(document) for document in documents]
    starts, ends = (np.concatenate([np.zeros(0, np.int32), *part]) for part in zip(*runs, strict=True))
    offsets = np.cumsum([0, *(len(run[0]) for run in runs)])
    return Sizes(np.array([len(d) for d in documents], np.int32), starts, ends, offsets)


def blocks_by_loop(document, block_size):
    """(blocks of tokens, blocks with a row whose target is supervised)"""
    rows = [t for t in range(len(document) - 1) if document[t + 1]]
    return -(-len(document) // block_size), len({t // block_size for t in rows})


documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=40).map(np.array), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(documents, st.sampled_from([1, 2, 4, 8]), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_rows_keep_both_capacities_and_hold_every_document_once(documents, block_size, spare, seed):
    length = (-(-max(map(len, documents)) // block_size) + spare) * block_size
    sizes, order = sizes_of(documents), np.random.default_rng(seed).permutation(len(documents))
    packing = pack(sizes, length=length, block_size=block_size, order=order)
    assert sorted(packing.documents) == list(range(len(documents)))
    assert packing.starts[0] == 0
    assert packing.starts[-1] == len(documents)
    assert packing.noisy_length <= length
    assert packing.noisy_length % block_size == 0
    for row in range(len(packing)):
        held = [blocks_by_loop(documents[d], block_size) for d in packing[row]]
        assert held
        assert sum(clean for clean, _ in held) * block_size <= length
        assert sum(noisy for _, noisy in held) * block_size <= packing.noisy_length
    assert packing.efficiency == sum(map(len, documents)) / (len(packing) * length)
    again = pack(sizes, length=length, block_size=block_size, order=order)
    assert np.array_equal(again.documents, packing.documents)
    assert np.array_equal(again.starts, packing.starts)


@settings(max_examples=100, deadline=None)
@given(documents, st.sampled_from([1, 3, 4, 8]))
def test_demand_is_what_a_loop_counts(documents, block_size):
    need = demand(sizes_of(documents), block_size)
    assert list(zip(need.clean, need.noisy, strict=True)) == [blocks_by_loop(d, block_size) for d in documents]


def test_no_row_is_opened_while_another_has_room_for_the_document():
    halves = sizes_of([np.arange(8) > 2] * 7)
    packing = pack(halves, length=16, block_size=4, order=np.arange(7), noisy_length=16)
    assert sorted(len(packing[row]) for row in range(len(packing))) == [1, 2, 2, 2]


def test_refused_with_numbers():
    one = sizes_of([np.arange(12) > 3])  # rows 3 to 10 have a target: 3 blocks of 4
    with pytest.raises(ValueError, match="needs 12 noisy rows, more than noisy_length=8"):
        pack(one, length=16, block_size=4, order=np.arange(1), noisy_length=8)
    pack(one, length=16, block_size=4, order=np.arange(1), noisy_length=12)
    with pytest.raises(ValueError, match="12 tokens does not fit rows of 8"):
        pack(one, length=8, block_size=4, order=np.arange(1))
    with pytest.raises(ValueError, match="rows of 18 tokens are no multiple of block_size=4"):
        pack(one, length=18, block_size=4, order=np.arange(1))


TOKENIZER = demo_tokenizer()


@pytest.fixture(scope="module")
def problems():
    return load_rows("problems:train,count=300", TOKENIZER, length=112)


def form(batch_size=4, length=256, block_size=4):
    return BatchFormat(batch_size, length, block_size, mask_id=512, end_id=TOKENIZER.eos_token_id)


def packed(rows, seed=0, length=256, **options):
    order = np.random.default_rng(seed).permutation(len(rows))
    return pack(rows.sizes(), length=length, block_size=4, order=order, **options)


def documents_of(batch):
    """[the tokens of every document, as bytes], row by row."""
    return [
        [batch.tokens[row, batch.segments[row] == n].tobytes() for n in range(1, batch.segments[row].max() + 1)]
        for row in range(len(batch.tokens))
    ]


def test_the_projects_problems_fill_their_rows():
    packing = packed(load_rows("problems:train,count=2000", TOKENIZER, length=112), length=1024)
    assert packing.efficiency > 0.95
    assert str(packing) == (
        f"packed into {len(packing)} rows of 1024, {100 * packing.efficiency:.1f} % full; noisy rows "
        f"{packing.noisy_length} of 1024"
    )


@pytest.mark.parametrize("fill", [False, True])
def test_an_epoch_has_every_document_once_and_its_noisy_rows_fit(problems, fill):
    format_ = BatchFormat(4, 224, 4, 512, TOKENIZER.eos_token_id, fill_last_block_with_end=fill)
    packing = packed(problems, length=224, filled=format_.filled_block)
    packing = packed(problems, length=224, filled=format_.filled_block, noisy_length=packing.noisy_length)
    batches = TrainBatches(problems, format_, seed=1, epochs=4, packing=packing)
    assert batches.total_batches == len(packing)
    count = {}
    for batch in batches:
        wanted = (batch.weights != 0).reshape(4, -1, 4).any(-1).sum(-1) * 4
        assert wanted.max() <= batches.target_rows <= packing.noisy_length
        for document in (d for row in documents_of(batch) for d in row):
            count[document] = count.get(document, 0) + 1
    assert sum(count.values()) == 4 * len(problems)
    assert not [n for n in count.values() if n % 4]  # problems that are equal count together


def test_the_batch_does_not_depend_on_who_makes_it(problems):
    packing = packed(problems)
    whole = TrainBatches(problems, form(), seed=1, packing=packing)
    hosts = [TrainBatches(problems, form(), seed=1, packing=packing, local=local) for local in ([0, 3], [1], [2])]
    for _ in range(30):
        batch, parts = next(whole), [next(host) for host in hosts]
        assert {host.target_rows for host in hosts} == {whole.target_rows}
        for field, *some in zip(batch, *parts, strict=True):
            joined = np.concatenate(some)[[0, 2, 3, 1]]
            assert np.array_equal(joined, field)
    for each in (whole, *hosts):
        each.close()


def config(*overrides):
    return load_config(None, ["model.source=x", "data.train=problems:train,count=300", "output.directory=x",
                              "optimizer.steps=1", "data.length=112", "data.packing=true", *overrides])  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.row_length=258"], r"rows of 258 tokens .data.row_length. are no multiple of objective.block_size=4"),
        (["data.row_length=96"], r"data.row_length=96 is shorter than a document of data.length=112"),
        (["data.noisy_length=30"], r"data.noisy_length=30 must be a multiple of 4 .block_size. and at most 112"),
        (["data.noisy_length=116"], "at most 112"),
        (["data.packing=false", "data.row_length=256"], "data.row_length=256 goes with data.packing=true"),
        (["data.packing=false", "data.noisy_length=64"], "data.noisy_length=64 goes with data.packing=true"),
    ],
)  # fmt: skip
def test_settings_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        config(*overrides)


def test_data_refused(problems):
    with pytest.raises(ConfigError, match=r"data: a document needs \d+ noisy rows, more than noisy_length=8"):
        pack_rows(config("data.noisy_length=8"), problems, form(length=112))
    endless = SimpleNamespace(name="problems:train", counted=False)
    with pytest.raises(ConfigError, match="needs the number of rows: problems:train,count=10000"):
        pack_rows(config(), endless, form(length=112))
