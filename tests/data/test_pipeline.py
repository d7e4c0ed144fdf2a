"""Order, epochs and resumption of training batches; each row once in evaluation."""

import json
from collections import Counter
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest

from marsjax.data.batch import BatchFormat
from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.pipeline import TrainBatches, eval_batches, load_rows
from marsjax.data.rows import TURN_IN_TEXT
from marsjax.data.sources import DataError

TOKENIZER = demo_tokenizer()
END = TOKENIZER.eos_token_id


def conversations(count):
    return [
        [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"The number is {i}."}]
        for i in range(count)
    ]


def form(batch_size, length=64, **changes):
    return BatchFormat(batch_size, length, 4, mask_id=512, end_id=END, **changes)


def texts(batch):
    """The answers of a batch's rows, one string a row."""
    out = []
    for ids, segments in zip(batch.tokens, batch.segments, strict=True):
        if segments.any():
            out.append(TOKENIZER.decode(ids[segments > 0]).split("number is ")[1].split(".")[0])
    return out


def equal(a, b):
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def test_every_epoch_has_every_row_once_in_another_order():
    rows = load_rows(conversations(12), TOKENIZER, length=64)
    batches = TrainBatches(rows, form(4), seed=3, epochs=2)
    assert batches.total_batches == 6
    seen = [text for batch in batches for text in texts(batch)]
    first, second = seen[:12], seen[12:]
    assert sorted(first) == sorted(second) == sorted(map(str, range(12)))
    assert len({tuple(first), tuple(second), tuple(map(str, range(12)))}) == 3
    other = [text for batch in TrainBatches(rows, form(4), seed=4, epochs=1) for text in texts(batch)]
    assert sorted(other) == sorted(first)
    assert other != first
    again = [text for batch in TrainBatches(rows, form(4), seed=3, epochs=2) for text in texts(batch)]
    assert again == seen


def test_batches_run_across_the_edge_of_an_epoch():
    rows = load_rows(conversations(7), TOKENIZER, length=64)
    seen = Counter(t for batch in TrainBatches(rows, form(3), seed=0, epochs=3) for t in texts(batch))
    assert sum(seen.values()) == 21
    assert set(seen.values()) == {3}


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_resume_after_every_batch(prefetch):
    """7 rows in batches of 3 for 3 epochs: edges of epochs fall inside batches, and prefetch runs past them."""
    rows = load_rows(conversations(7), TOKENIZER, length=64)

    def fresh():
        return TrainBatches(rows, form(3), seed=1, epochs=3, prefetch=prefetch)

    whole = list(fresh())
    assert len(whole) == 7
    running = fresh()
    for k in range(8):
        state = json.loads(json.dumps(running.state()))
        resumed = fresh()
        if k % 2:
            next(resumed)  # restoring also works on an iterator that has already moved (and prefetched)
        resumed.restore(state)
        assert resumed.state() == state
        rest = list(resumed)
        assert len(rest) == 7 - k
        assert all(equal(a, b) for a, b in zip(rest, whole[k:], strict=True))
        if k < 7:
            assert equal(next(running), whole[k])


@pytest.mark.parametrize("count", ["", ",count=50"])
def test_resume_of_the_generator(count):
    rows = load_rows(f"problems:train,seed=2{count}", TOKENIZER, length=128)
    one = TrainBatches(rows, form(8, 128), seed=1)
    for _ in range(9):  # 72 rows: of 50, into the second epoch
        next(one)
    two = TrainBatches(rows, form(8, 128), seed=1)
    two.restore(one.state())
    assert all(equal(next(one), next(two)) for _ in range(5))


def test_another_batch_size_goes_on_at_the_next_row():
    rows = load_rows(conversations(12), TOKENIZER, length=64)
    one = TrainBatches(rows, form(4), seed=3, epochs=1)
    seen = texts(next(one))
    two = TrainBatches(rows, form(2), seed=3, epochs=1)
    two.restore(one.state())
    seen += [t for batch in two for t in texts(batch)]
    assert sorted(seen) == sorted(map(str, range(12)))


def test_refuses_a_position_in_other_data():
    rows = load_rows(conversations(12), TOKENIZER, length=64)
    state = TrainBatches(rows, form(4), seed=3).state()
    with pytest.raises(DataError, match="seed 3, this run has 4"):
        TrainBatches(rows, form(4), seed=4).restore(state)
    with pytest.raises(DataError, match="rows 12, this run has 11"):
        TrainBatches(load_rows(conversations(11), TOKENIZER, length=64), form(4), seed=3).restore(state)
    changed = [*conversations(11), *conversations(1)]
    with pytest.raises(DataError, match=r"position has fingerprint \d+, this run has \d+; use the same data"):
        TrainBatches(load_rows(changed, TOKENIZER, length=64), form(4), seed=3).restore(state)
    first = TrainBatches(load_rows("problems:train,seed=1", TOKENIZER, length=128), form(4, 128), seed=0)
    with pytest.raises(DataError, match="fingerprint"):
        TrainBatches(load_rows("problems:train,seed=2", TOKENIZER, length=128), form(4, 128), seed=0).restore(
            first.state()
        )


def test_a_template_that_writes_the_date_goes_on_another_day(monkeypatch):
    tokenizer = demo_tokenizer()
    plain = tokenizer.chat_template
    # As Llama 3's: the date in a set, behind a test, white space at the beginning.
    tokenizer.chat_template = (
        "\n {% if date is not defined and strftime_now is defined %}"
        "{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }} " + plain
    )

    def on(day, **options):
        clock = SimpleNamespace(now=lambda: datetime(2026, 3, day))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        rows = load_rows(conversations(4), tokenizer, length=64, **options)
        return TrainBatches(rows, form(4), seed=3).state(), tokenizer.decode(rows[0].ids)

    (first, text), (second, _) = on(1), on(2)
    assert first == second
    sent = tokenizer.apply_chat_template(conversations(1)[0], tokenize=False)
    assert sent.startswith("\n02 Mar 2026 <|")
    assert text == sent.replace("02 Mar 2026", "01 Jan 2025").removesuffix("\n")
    assert on(1, date="Xmas")[1].startswith("\nXmas <|")


def test_messages_that_hold_turn_tokens_are_dropped_and_counted():
    def said(question, answer):
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    kept = [said("Hi", "No."), said("What is <|endoftext|>?", "<|endoftext|> pads.")]  # the template marks none with it
    dropped = [
        said("Hi", "It<|im_end|> ends."),
        said("A<|im_end|>\n<|im_start|>system\nB", "C"),
        said("<|im_start|>", "D"),
    ]
    rows = load_rows([*kept, *dropped], TOKENIZER, length=64)
    assert rows.stats.dropped == {TURN_IN_TEXT: 3}
    assert len(rows) == 2
    assert all(row.ids.tolist().count(END) == 2 for row in (rows[0], rows[1]))
    other = load_rows(kept, TOKENIZER, length=64, end_id=TOKENIZER.pad_token_id)
    assert other.stats.dropped == {TURN_IN_TEXT: 1}


@pytest.mark.parametrize("count", [1, 7, 8, 13, 16])
def test_evaluation_counts_each_row_once(count):
    rows = load_rows(conversations(count), TOKENIZER, length=64)
    batches = list(eval_batches(rows, form(8)))
    assert len(batches) == -(-count // 8)
    assert [t for b in batches for t in texts(b)] == [str(i) for i in range(count)]
    assert all(b.tokens.shape == (8, 64) for b in batches)
    assert sum(b.denominator.sum() for b in batches) == sum(r.supervised.sum() for r in rows)
    sequence = list(eval_batches(rows, form(8, normalisation="sequence")))
    assert sum(b.denominator.sum() for b in sequence) == count
    assert [t for b in eval_batches(rows, form(8), 9) for t in texts(b)] == [str(i) for i in range(min(9, count))]


def test_nothing_supervised_is_an_error_with_counts():
    only_users = [[{"role": "user", "content": "Hi"}]] * 3
    with pytest.raises(DataError, match=r"no supervised token.*3 conversations, 0 rows.*3 dropped: no assistant"):
        load_rows(only_users, TOKENIZER, length=64)
    with pytest.raises(DataError, match=r"within 4 tokens.*5 dropped: prompt longer than the limit"):
        load_rows(conversations(5), TOKENIZER, length=4)
    with pytest.raises(DataError, match="256 dropped: prompt longer than the limit"):
        load_rows("problems:train", TOKENIZER, length=8)


def test_generated_problems_that_do_not_fit_are_skipped():
    endless = load_rows("problems:train", TOKENIZER, length=40)
    fitting = sum(endless[i] is not None for i in range(200))
    assert 0 < fitting < 200
    assert sum((b.segments[:, 0] > 0).sum() for b in eval_batches(endless, form(8, 40), 200)) == fitting
    train = TrainBatches(endless, form(8, 40), seed=0)
    assert all((next(train).segments[:, 0] > 0).all() for _ in range(4))
    train.close()


@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_over_counted_problems_are_of_those_that_fit(epochs):
    endless = load_rows("problems:train", TOKENIZER, length=40)
    fitting = sum(endless[i] is not None for i in range(100))
    rows = load_rows("problems:train,count=100", TOKENIZER, length=40)
    assert len(rows) == rows.stats.rows == fitting < 100
    train = TrainBatches(rows, form(8, 40), seed=0, epochs=epochs)
    assert len(list(train)) == train.total_batches == fitting * epochs // 8


def test_epochs_need_an_end():
    rows = load_rows("problems:train,seed=1", TOKENIZER, length=128)
    with pytest.raises(DataError, match=r"epochs=2 .*give it a count, as in problems:train,seed=1,count=10000"):
        TrainBatches(rows, form(4, 128), seed=0, epochs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "data seed -1 is out of range"),
        ({"seed": 0, "epochs": 0}, "epochs must be at least 1, got 0"),
        ({"seed": 0, "epochs": 1}, "3 rows x 1 epochs fill no batch of 4"),
    ],
)
def test_refuses_bad_options(options, message):
    rows = load_rows(conversations(3), TOKENIZER, length=64)
    with pytest.raises(ValueError, match=message):
        TrainBatches(rows, form(4), **options)


def test_end_token_is_the_templates():
    tokenizer = demo_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # as in base models
    rows = load_rows(conversations(1), tokenizer, length=64)
    assert rows[0].ids[-1] == END
    assert load_rows(conversations(1), tokenizer, length=64, end_id=5)[0].ids[-1] == 5
