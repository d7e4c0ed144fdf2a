"""Built rows against rows tokenised directly; statistics against a recount; what is refused, what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

from marsjax import cli
from marsjax.data import build as building
from marsjax.data import tokenise
from marsjax.data.batch import BatchFormat
from marsjax.data.build import build
from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.identity import Identity, tokenizer_fingerprint
from marsjax.data.loading import load_rows, row_maker
from marsjax.data.mixture import MixedRows
from marsjax.data.pipeline import TrainBatches
from marsjax.data.rows import Row
from marsjax.data.sources import DataError
from marsjax.data.statistics import Survey
from marsjax.data.token_records import decode_row, encode_row
from marsjax.data.tokenizers import tokenizer_and_mask
from marsjax.text.mask_token import MASK_TEXT

TOKENIZER, MASK = tokenizer_and_mask("demo")
LENGTH = 72


def maker(length=LENGTH, mask_id=MASK, **kwargs):
    return row_maker(TOKENIZER, length, mask_id, None, kwargs)


def line(question, answer, *more):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns * (1 + len(more))}


@pytest.fixture
def source(tmp_path):
    """300 conversations of one and two turns; long answers, long prompts, texts that may not be, and no answers."""
    path = tmp_path / "chats.jsonl"
    records = [line(f"Q {i}", "word " * (1 + i % 40), *([1] * (i % 3 == 0))) for i in range(300)]
    records[7] = line("Q" * 200, "A")
    records[9] = line("Q", f"an {MASK_TEXT} answer")
    records[11] = {"messages": [{"role": "user", "content": "Q"}]}
    records[150] = line("Q <|im_end|>", "A")
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def direct(source, **options):
    return load_rows(str(source), TOKENIZER, **{"length": LENGTH, "mask_id": MASK, **options})


def assert_equal(built, wanted):
    assert len(built) == len(wanted)
    for i in range(len(wanted)):
        got, want = built[i], wanted[i]
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_array_equal(got.supervised, want.supervised)
        assert (got.ids.dtype, got.supervised.dtype, got.complete) == (np.int32, bool, want.complete)
    for got, want in zip(built.sizes(), wanted.sizes(), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    assert (built.fingerprint, str(built.stats)) == (wanted.fingerprint, str(wanted.stats))


@pytest.mark.parametrize(("shards", "workers"), [(None, 0), (3, 0), (4, 2)])
def test_what_is_read_back_is_what_is_tokenised(source, tmp_path, shards, workers):
    out = tmp_path / "deep" / "rows of mine"
    build(str(source), out, maker(), shards=shards, num_workers=workers)
    rows = load_rows(f"rows:{out}", TOKENIZER, length=LENGTH, mask_id=MASK)
    assert_equal(rows, direct(source))
    assert len(list(out.glob("rows-train.*"))) == (shards or 1)
    assert sorted(p.name for p in tmp_path.joinpath("deep").iterdir()) == ["rows of mine"]
    with pytest.raises(IndexError, match=f"row {len(rows)} of {len(rows)}"):
        rows[len(rows)]


def test_training_on_built_rows_is_training_on_the_source(source, tmp_path):
    build(str(source), tmp_path / "out", maker())
    form = BatchFormat(8, LENGTH, 4, mask_id=MASK, end_id=TOKENIZER.eos_token_id)
    built = TrainBatches(load_rows(f"rows:{tmp_path}/out", TOKENIZER, length=LENGTH, mask_id=MASK), form, seed=3)
    plain = TrainBatches(direct(source), form, seed=3)
    for _ in range(5):
        for got, want in zip(next(built), next(plain), strict=True):
            np.testing.assert_array_equal(got, want)


def test_built_directories_mix(source, tmp_path):
    build(str(source), tmp_path / "a", maker())
    build("problems:train,count=30", tmp_path / "b", maker(), shards=2)
    weights = {f"rows:{tmp_path}/a": 3, f"rows:{tmp_path}/b": 1}
    rows = load_rows(weights, TOKENIZER, length=LENGTH, mask_id=MASK)
    parts = [direct(source), direct("problems:train,count=30")]
    assert_equal(rows, MixedRows(dict(zip(weights, parts, strict=True)), weights))
    assert min(rows.counts.values()) > 20
    assert rows.counted


def test_tensorflow_datasets_reads_it(source, tmp_path):
    build(str(source), tmp_path / "out", maker(), shards=3)
    (tmp_path / "out").rename(tmp_path / "moved")
    found = tfds.builder_from_directory(str(tmp_path / "moved")).as_data_source(split="train")
    wanted = direct(source)
    assert len(found) == len(wanted)
    for i in (0, 100, 101, len(wanted) - 1):
        np.testing.assert_array_equal(found[i]["ids"], wanted[i].ids)
        supervised = np.zeros(len(wanted[i].ids), bool)
        for start, end in zip(found[i]["span_starts"], found[i]["span_ends"], strict=True):
            supervised[start:end] = True
        np.testing.assert_array_equal(supervised, wanted[i].supervised)
        assert found[i]["complete"] == wanted[i].complete
        assert found[i]["ids"].dtype == np.int32
    assert "tensorflow" not in sys.modules


def test_records_are_those_of_tensorflow_datasets():
    integers = tfds.features.Tensor(shape=(None,), dtype=np.int32)
    features = tfds.features.FeaturesDict(
        {"ids": integers, "span_starts": integers, "span_ends": integers, "complete": np.bool_}
    )
    supervised = np.array([0, 1, 1, 0, 0, 1], bool)
    row = Row(np.array([3, 150_000, 0, 7, 2**31 - 1, 1], np.int32), supervised, False)
    example = {"ids": row.ids, "span_starts": [1, 5], "span_ends": [3, 6], "complete": False}
    for record in (encode_row(row), features.serialize_example(example)):
        read = decode_row(record)
        np.testing.assert_array_equal(read.ids, row.ids)
        np.testing.assert_array_equal(read.supervised, supervised)
        assert read.complete is False
    assert encode_row(row) == encode_row(row)
    for bad in (b"", b"text", encode_row(row)[:-9]):
        with pytest.raises(ValueError, match="not a token row"):
            decode_row(bad)


def test_statistics_are_a_recount(source, tmp_path):
    build(str(source), tmp_path / "out", maker(), shards=2)
    told = json.loads((tmp_path / "out/statistics.json").read_text())
    wanted = direct(source)
    rows = [wanted[i] for i in range(len(wanted))]
    lengths = np.array([len(row.ids) for row in rows])
    assert told["conversations"] == 300
    assert told["rows"] == len(rows) == sum(told["shards"])
    assert told["tokens"] == lengths.sum()
    assert told["supervised_tokens"] == sum(int(row.supervised.sum()) for row in rows)
    assert told["supervised_share"] == told["supervised_tokens"] / told["tokens"]
    assert told["cut"] == sum(not row.complete for row in rows) > 50
    assert told["longest"] == LENGTH
    edges = np.arange(17) * LENGTH / 16 + 1
    np.testing.assert_array_equal(told["histogram"], np.histogram(lengths, edges)[0])
    assert told["dropped"] == {
        "no assistant answer": 1,
        "prompt longer than the limit": 1,
        "text contains a token that marks turns": 1,
        "text contains the mask token": 1,
    }
    assert told["source"] == str(source)
    assert (told["length"], told["mask_id"], told["end_id"]) == (LENGTH, MASK, TOKENIZER.eos_token_id)
    assert told["tokenizer"] == tokenizer_fingerprint(TOKENIZER)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_records_are_dropped_and_counted(tmp_path, workers):
    good = [json.dumps(line(f"Q {i}", "A")) for i in range(6)]
    bad = ["{", '{"a": 1}', '{"messages": []}', json.dumps({"messages": [{"role": "user"}]}), "{{"]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join([*good[:3], *bad, *good[3:]]) + "\n")
    with pytest.raises(DataError, match="5 unusable lines"):  # training itself is strict
        direct(path)
    found = build(str(path), tmp_path / "out", maker(), num_workers=workers)
    assert found.stats.conversations == 11
    assert found.stats.rows == 6
    assert found.stats.dropped == {
        "unusable: not JSON (Expecting property name enclosed in double quotes at column N)": 2,
        "unusable: keys ['a'] are none of messages, prompt/response, prompt/completion, question/an": 1,
        "unusable: the conversation has no messages": 1,
        "unusable: message N: 'content' must be a string, but is missing": 1,
    }
    assert found.unusable[0].startswith("record 3: not JSON")
    assert len(found.unusable) == 5
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    assert found.fingerprint == direct(tmp_path / "good.jsonl").fingerprint


def test_a_conversation_that_the_template_refuses_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    alien = [{"role": "alien", "content": "x"}, {"role": "assistant", "content": "A"}]
    path.write_text(json.dumps(line("Q", "A")) + "\n" + json.dumps({"messages": alien}))
    strict = demo_tokenizer()
    strict.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}{% endfor %}"
        + strict.chat_template
    )
    found = build(str(path), tmp_path / "out", row_maker(strict, 64, None, None, {}))
    assert found.stats.rows == 1
    (reason,) = found.stats.dropped
    assert reason.startswith("unusable: the chat template refuses")
    assert "no aliens" in found.unusable[0]


def test_only_so_many_reasons_are_counted():
    survey = Survey("x", Identity.of(maker()))
    survey.stats.dropped = Counter({f"unusable: {i:03d}": 1 + i for i in range(200)})
    survey.stats.dropped["no assistant answer"] = 1
    total = survey.stats.dropped.total()
    survey._merge_reasons()
    survey.stats.dropped.update({f"unusable: new {i}": 1 for i in range(100)})
    survey._merge_reasons()
    assert survey.stats.dropped.total() == total + 100
    assert len(survey.stats.dropped) <= 51
    assert survey.stats.dropped["no assistant answer"] == 1
    assert survey.stats.dropped["unusable: 199"] == 200
    survey.stats.dropped = Counter({"unusable: other reasons": 1, **{f"unusable: {i}": 5 for i in range(60)}})
    survey._merge_reasons()
    assert survey.stats.dropped.total() == 301


def test_rows_for_another_run_are_refused_by_name(source, tmp_path):
    build(str(source), tmp_path / "out", maker())
    name = f"rows:{tmp_path}/out"
    options = {"length": LENGTH, "mask_id": MASK}
    other = demo_tokenizer(500)
    changed = demo_tokenizer()
    changed.chat_template = changed.chat_template.replace("\\n", " ")
    for tokenizer, change, message in (
        (TOKENIZER, {"length": 64}, f"length {LENGTH} there, 64 here; build it again from {source}"),
        (TOKENIZER, {"mask_id": 3}, f"mask_id {MASK} there, 3 here"),
        (TOKENIZER, {"end_id": 5}, f"end_id {TOKENIZER.eos_token_id} there, 5 here"),
        (TOKENIZER, {"enable_thinking": False}, r"template_kwargs {} there, {'enable_thinking': False} here"),
        (changed, {}, "for another run: chat_template"),
        (other, {}, "for another run: tokenizer [0-9a-f]{16} there, [0-9a-f]{16} here"),
    ):
        with pytest.raises(DataError, match=message):
            load_rows(name, tokenizer, **{**options, **change})
    plain = demo_tokenizer()  # without a mask token, as for plain fine-tuning: the control reads the same rows
    assert len(load_rows(name, plain, length=LENGTH)) == len(direct(source))
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(TOKENIZER) != tokenizer_fingerprint(other)


def test_damage_is_refused(source, tmp_path):
    def fresh(name):
        build(str(source), tmp_path / name, maker(), shards=2)
        return tmp_path / name, sorted((tmp_path / name).glob("rows-train.*"))

    def read(path):
        return load_rows(f"rows:{path}", TOKENIZER, length=LENGTH, mask_id=MASK)

    out, shards = fresh("one")
    shards[1].unlink()
    with pytest.raises(DataError, match=r"one holds \d+ rows, not the \d+ that were written"):
        read(out)
    out, shards = fresh("two")
    shards[0].write_bytes(shards[0].read_bytes()[:1000])
    with pytest.raises(DataError, match=r"rows-train.array_record-00000-of-00002 is not a readable ArrayRecord"):
        read(out)
    out, shards = fresh("damaged")
    damaged = bytearray(shards[0].read_bytes())
    damaged[5000:5100] = bytes(100)
    shards[0].write_bytes(damaged)
    with pytest.raises(DataError, match=r"damaged, row \d+: .*[Cc]orrupted"):
        list(read(out))
    out, _ = fresh("three")
    (out / "sizes.npz").write_bytes(b"text")
    with pytest.raises(DataError, match=r"sizes.npz cannot be read.*build again"):
        read(out).sizes()
    (out / "statistics.json").write_text('{"format": "marsjax token rows", "version": 99}')
    with pytest.raises(DataError, match=r"version 99; this marsjax reads .* up to version 1"):
        read(out)
    (out / "statistics.json").write_text("{}")
    with pytest.raises(DataError, match="is not what marsjax data build writes"):
        read(out)
    with pytest.raises(DataError, match=r"rows:absent: no such directory"):
        read("absent")
    with pytest.raises(DataError, match="holds token rows, not conversations"):
        load_rows(f"arrayrecord:{out}", TOKENIZER, length=LENGTH)


def test_refusals_leave_nothing_behind(source, tmp_path, monkeypatch):
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    silent = tmp_path / "silent.jsonl"
    silent.write_text(json.dumps({"messages": [{"role": "user", "content": "Q"}]}) + "\n" + "{\n")
    for spec, options, message in (
        (
            str(silent),
            {},
            r"no supervised token.*2 conversations, 0 rows.*1 dropped: no assistant.*1 dropped: unusable",
        ),
        (str(source), {"shards": 301}, "shards must be 1 to the 300 conversations of .*, got 301"),
        (str(source), {"shards": 0}, "shards must be 1 to"),
        (str(source), {"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ("problems:train", {}, "problems:train has no end; give it a count"),
        ("rows:x", {}, "holds token rows"),
    ):
        with pytest.raises(DataError, match=message):
            build(spec, out, maker(), **options)
        assert list(out.parent.iterdir()) == []
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'marsjax\[data\]'"):
        build(str(source), out, maker())
    monkeypatch.undo()
    out.mkdir()
    with pytest.raises(DataError, match="out exists; remove it"):
        build(str(source), out, maker())
    assert list(out.parent.iterdir()) == [out]


def test_a_full_disk_is_told_and_nothing_kept(source, tmp_path, monkeypatch):
    out = tmp_path / "here" / "out"
    monkeypatch.setattr(building, "ArrayRecordWriter", lambda path, options: ArrayRecordWriter("/dev/full", options))
    with pytest.raises(OSError, match=r"writing .*part-00000 failed: .*No space left on device.*free some space"):
        build(str(source), out, maker())
    assert list(out.parent.iterdir()) == []
    monkeypatch.undo()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(building.np, "savez", full)
    with pytest.raises(OSError, match="No space left on device; nothing was kept, free some space"):
        build(str(source), out, maker())
    assert list(out.parent.iterdir()) == []


def test_a_writer_that_loses_rows_is_noticed(source, tmp_path, monkeypatch):
    class Losing:
        def __init__(self, path, options):
            self._real, self._count = ArrayRecordWriter(path, options), 0

        def write(self, record):
            self._count += 1
            if self._count != 50:
                self._real.write(record)

        def close(self):
            self._real.close()

    monkeypatch.setattr(building, "ArrayRecordWriter", Losing)
    with pytest.raises(OSError, match=r"holds \d+ of the \d+ rows written to it"):
        build(str(source), tmp_path / "out", maker())


def test_an_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    calls = Counter()
    encode = tokenise.encode_row

    def interrupted(row):
        calls["n"] += 1
        if calls["n"] == 200:
            raise KeyboardInterrupt
        return encode(row)

    monkeypatch.setattr(tokenise, "encode_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(str(source), tmp_path / "here/out", maker())
    assert list((tmp_path / "here").iterdir()) == []


def test_a_killed_build_leaves_no_half_directory_and_no_process(tmp_path):
    code = "import sys; from marsjax.cli import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "out"
    words = ["data", "build", "problems:train,count=300000", str(out), "--model", "demo", "--length", "96"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--num-workers", "1"], env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob(".out.building-*/part-00000")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        workers = [int(pid) for pid in children.read_text().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert workers
    assert not out.exists()
    end = time.monotonic() + 20
    while alive := [pid for pid in workers if _runs(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)
    build("problems:train,count=20", out, maker(96))  # what the killed one left is not in the way
    assert len(load_rows(f"rows:{out}", TOKENIZER, length=96, mask_id=MASK)) == 20


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_commands(source, tmp_path, capsys):
    def run(*words):
        code = cli.main(["data", *map(str, words)])
        return code, *capsys.readouterr()

    how = ("--model", "demo", "--length", LENGTH)
    code, told, _ = run("build", source, tmp_path / "out", *how, "--shards", 2)
    assert code == 0
    assert "300 conversations" in told
    assert f"data.train=rows:{tmp_path}/out data.length={LENGTH}" in told
    code, built, _ = run("stats", f"rows:{tmp_path}/out", "--json")
    assert code == 0
    code, counted, _ = run("stats", source, *how, "--json")
    assert code == 0
    assert json.loads(built) == json.loads(counted)
    code, shown, _ = run("stats", source, *how)
    assert "  1 dropped: text contains the mask token" in shown
    assert shown.splitlines()[1:] == told.splitlines()[1:-1]
    code, _, error = run("build", source, tmp_path / "out", *how)
    assert code == 1
    assert "out exists" in error
    code, _, error = run("stats", source)
    assert code == 1
    assert "--model and --length" in error
    code, _, _ = run("build", source, tmp_path / "kwargs", *how, "--template-kwargs", "enable_thinking", "false")
    assert code == 0
    assert json.loads((tmp_path / "kwargs/statistics.json").read_text())["template_kwargs"] == {
        "enable_thinking": False
    }
