import json
import re
import sys

import huggingface_hub
import numpy as np
import pyarrow
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath
from pyarrow import parquet

from marsjax.data import sources
from marsjax.data.problems import problem
from marsjax.data.sources import BadRecord, DataError, open_source, read_jsonl
from marsjax.data.tfds_source import split_name

PAIR = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_known_forms(tmp_path):
    system = [{"role": "system", "content": "S"}, *PAIR]
    path = write(
        tmp_path / "my data.jsonl",
        {"messages": PAIR},
        {"prompt": "Q", "response": "A"},
        "",
        {"prompt": "Q", "completion": "A", "id": 7},
        {"question": "Q", "answer": "A"},
        {"instruction": "Q", "input": "", "output": "A"},
        {"instruction": "Q", "input": "I", "output": "A"},
        {"prompt": "Q", "response": "A", "system": "S"},
        {"messages": system},
    )
    with_input = [{"role": "user", "content": "Q\n\nI"}, PAIR[1]]
    want = [PAIR, PAIR, PAIR, PAIR, PAIR, with_input, system, system]
    assert read_jsonl(path) == open_source(str(path)) == open_source(f"jsonl:{path}") == want


def test_unusual_bytes_are_text(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": "a\u2028b\x85c", "response": "ü"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n")
    ((question, answer),) = read_jsonl(path)
    assert question["content"] == "a\u2028b\x85c"
    assert answer["content"] == "ü"


def test_bad_lines_are_named_with_reasons(tmp_path, monkeypatch):
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "Q", "response": "A"},
        "{'single': 1}",
        [1, 2],
        {"prompt": "Q", "answer": "A"},
        {"messages": []},
        {"messages": "Q"},
        {"messages": [{"role": "user"}]},
        {"question": "Q", "answer": 7},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"prompt": "Q", "response": "an \ud83d"},
        {"messages": [{"role": "user", "content": "\udc00"}]},
        {"prompt": "Q", "response": "\ud83d\ude42"},
    )
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff", "response": "A"}\n')
    monkeypatch.setattr(sources, "_SHOWN", 20)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    said = str(caught.value)
    assert f"{path}: 11 unusable lines" in said
    for expected in (
        "line 2: not JSON",
        "line 3: a list, not an object",
        "line 4: keys ['answer', 'prompt'] are none of messages, prompt/response",
        "line 5: the conversation has no messages",
        "line 6: 'messages' is not a list",
        "line 7: message 0: 'content' must be a string, but is missing",
        "line 8: 'answer' must be a string, but is int",
        "line 9: message 0: 'content' must be a string, but is list",
        r"line 10: message 1: 'content' holds half a surrogate pair, '\ud83d' at 3: no character",
        "line 11: message 0: 'content' holds half a surrogate pair",
        "line 13: not UTF-8",
    ):
        assert expected in said


def test_many_bad_lines_are_summed_up(tmp_path):
    with pytest.raises(DataError, match="and 15 more"):
        read_jsonl(write(tmp_path / "a.jsonl", *["no"] * 25))


def test_paths(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no such data file: gone\.jsonl \(looked in "):
        open_source("gone.jsonl")
    with pytest.raises(DataError, match="is a directory"):
        open_source(f"jsonl:{tmp_path}")
    with pytest.raises(DataError, match="holds no conversations"):
        read_jsonl(write(tmp_path / "empty.jsonl", "", " "))
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.jsonl", {"prompt": "Q", "response": "A"})
    assert read_jsonl("~/mine.jsonl") == [PAIR]


def test_unknown_sources_say_what_exists():
    for spec in ("gsm8k", "s3:bucket/a", "problem:train"):
        with pytest.raises(DataError, match="use jsonl:PATH"):
            open_source(spec)


def test_problems():
    source = open_source("problems:test,seed=5,count=30")
    assert len(source) == 30
    made = problem(5, 29, "test")
    assert [m["content"] for m in source[29]] == [made.question, made.answer]
    assert len(list(source)) == 30
    assert len(open_source("problems:validation")) == 2000


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("problems:dev", "splits train, validation, test"),
        ("problems:test,sed=3", "'sed=3' is not seed=NUMBER or count=NUMBER"),
        ("problems:test,seed=x", "'seed=x' is not"),
        ("problems:test,count=0", "count must be at least 1, got 0"),
    ],
)
def test_refuses_bad_problem_sources(spec, message):
    with pytest.raises(DataError, match=message):
        open_source(spec)


RECORDS = [
    {"question": "Q", "answer": "A"},
    {"messages": PAIR, "id": 3},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S"},
    {"instruction": "Q", "input": "I", "output": "A"},
]
SAID = [PAIR, PAIR, [{"role": "system", "content": "S"}, *PAIR], [{"role": "user", "content": "Q\n\nI"}, PAIR[1]]]


def write_array_record(path, *records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record if isinstance(record, bytes) else json.dumps(record).encode())
    writer.close()
    return path


def test_turns_of_sharegpt(tmp_path):
    turns = [{"from": "system", "value": "S"}, {"from": "user", "value": "Q"}, {"from": "assistant", "value": "A"}]
    path = write(
        tmp_path / "a.jsonl",
        {"conversations": turns, "system": "not twice"},
        {"conversations": PAIR},
    )
    assert open_source(str(path)) == [SAID[2], PAIR]
    bad = write(
        tmp_path / "b.jsonl",
        {"conversations": "Q"},
        {"conversations": []},
        {"conversations": [["human", "Q"]]},
        {"conversations": [{"from": "bard", "value": "Q"}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"conversations": PAIR, "system": 3},
    )
    with pytest.raises(DataError) as caught:
        open_source(str(bad))
    for number, reason in enumerate(
        (
            "'conversations' is not a list",
            "the conversation has no messages",
            "turn 0 is list, not an object",
            "turn 0 is from 'bard', which is none of human, user, gpt",
            "message 0: 'content' must be a string, but is NoneType",
            "'system' must be a string, but is int",
        ),
        start=1,
    ):
        assert f"line {number}: {reason}" in str(caught.value)


def test_array_records_by_index(tmp_path, monkeypatch):
    for i, part in enumerate((RECORDS[:1], RECORDS[1:3], RECORDS[3:])):
        write_array_record(tmp_path / f"chat.array_record-0000{i}-of-00003", *part)
    for spec in (tmp_path, tmp_path / "chat.*-of-00003"):
        source = open_source(f"arrayrecord:{spec}")
        assert len(source) == 4
        assert [source[i] for i in (3, 0, 2, 1)] == [SAID[i] for i in (3, 0, 2, 1)]
        assert list(source) == SAID
    monkeypatch.chdir(tmp_path)
    assert list(open_source("arrayrecord:chat.array_record-00001-of-00003")) == SAID[1:3]


def test_a_bad_record_is_named_when_it_is_read(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", *RECORDS, b"{", b'{"prompt": "\xff"}', b"[]", {"a": 1})
    source = open_source(f"arrayrecord:{path}")
    assert source[3] == SAID[3]
    for index, reason in (
        (4, "not JSON"),
        (5, "not UTF-8"),
        (6, "a list, not an object"),
        (7, r"keys \['a'\] are none of messages"),
    ):
        with pytest.raises(BadRecord, match=f"^arrayrecord:{path}, record {index}: {reason}") as caught:
            source[index]
        assert re.match(reason, caught.value.reason)
    with pytest.raises(IndexError, match="record 8 of 8"):
        source[8]


def test_array_record_files_that_cannot_be_read(tmp_path):
    (tmp_path / "not.array_record").write_bytes(b"text " * 1000)
    whole = write_array_record(tmp_path / "whole.array_record", *RECORDS).read_bytes()
    (tmp_path / "cut.array_record").write_bytes(whole[: len(whole) // 2])
    for name in ("not", "cut"):
        with pytest.raises(DataError, match=f"{name}.array_record is not a readable ArrayRecord file"):
            open_source(f"arrayrecord:{tmp_path}/{name}.array_record")
    with pytest.raises(DataError, match=r"missing-\* names no file"):
        open_source(f"arrayrecord:{tmp_path}/missing-*")
    write_array_record(tmp_path / "none.array_record")
    with pytest.raises(DataError, match="holds no conversations"):
        open_source(f"arrayrecord:{tmp_path}/none.array_record")


def test_a_damaged_file_is_named_where_it_is_damaged(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", *RECORDS * 1000)
    damaged = bytearray(path.read_bytes())
    damaged[100_000:100_400] = bytes(400)
    path.write_bytes(damaged)
    source = open_source(f"arrayrecord:{path}")
    assert source[0] == SAID[0]
    with pytest.raises(DataError, match=f"^arrayrecord:{path}, record [0-9]+ cannot be read: Corrupted"):
        list(source)


def test_lines_by_index_are_the_lines_read_in_full(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n \n".join(map(json.dumps, RECORDS)).encode())
    lines = open_source(str(path), in_full=False)
    assert [lines[i] for i in (3, 1, 0, 2)] == [SAID[i] for i in (3, 1, 0, 2)]
    assert list(lines) == open_source(str(path)) == SAID
    write(path, RECORDS[0], "{", RECORDS[1])
    lines = open_source(f"jsonl:{path}", in_full=False)
    assert [lines[0], lines[2]] == SAID[:2]
    with pytest.raises(BadRecord, match=f"jsonl:{path}, record 1: not JSON"):
        lines[1]


def write_parquet(path, records, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path, **options)
    return path


def test_parquet_by_index(tmp_path):
    columns = [{"messages": None, "question": None, "answer": None, "extra": i, **r} for i, r in enumerate(RECORDS[:2])]
    columns[1].pop("id")
    many = [{"question": f"Q{i}", "answer": f"A{i}", "system": None if i % 2 else "S"} for i in range(50)]
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", columns)
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", many, row_group_size=7)
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", many[:3])
    source = open_source(f"hf:{tmp_path}")
    assert len(source) == 52
    assert [source[0], source[1]] == [PAIR, PAIR]
    for i in (49, 0, 48, 7, 6, 21, 1):
        system = [] if i % 2 else [{"role": "system", "content": "S"}]
        want = [*system, {"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]
        assert source[2 + i] == want
    assert len(list(source)) == 52
    assert len(open_source(f"hf:{tmp_path}:test")) == 3
    write_parquet(tmp_path / "data/test_gen-00000-of-00001.parquet", many)  # another split, whatever its beginning
    write_parquet(tmp_path / "data/test_1.parquet", many[:1])
    assert len(open_source(f"hf:{tmp_path}:test")) == 4
    assert len(open_source(f"hf:{tmp_path}:test_gen")) == 50
    with pytest.raises(DataError, match=r"no parquet file of a split 'val'; there are data/test-00000"):
        open_source(f"hf:{tmp_path}:val")


def test_parquet_that_cannot_be_used(tmp_path):
    for name in ("main", "socratic"):
        write_parquet(tmp_path / f"two/{name}/train-00000-of-00001.parquet", RECORDS[:1])
    with pytest.raises(DataError, match=r"several configurations \(main, socratic\); name one"):
        open_source(f"hf:{tmp_path}/two")
    assert list(open_source(f"hf:{tmp_path}/two/main")) == [PAIR]
    write_parquet(tmp_path / "other/train.parquet", [{"text": "T", "label": 1}])
    with pytest.raises(DataError, match="has the columns text, label; none of messages"):
        open_source(f"hf:{tmp_path}/other")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/train.parquet").write_bytes(b"text" * 100)
    with pytest.raises(DataError, match=r"broken/train.parquet is not a readable parquet file"):
        open_source(f"hf:{tmp_path}/broken")
    with pytest.raises(DataError, match="no such directory"):
        open_source(f"hf:{tmp_path}/absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no parquet files there"):
        open_source(f"hf:{tmp_path}/empty")
    write_parquet(tmp_path / "bad/train.parquet", [{"question": "Q", "answer": None}, {"question": "Q", "answer": "A"}])
    source = open_source(f"hf:{tmp_path}/bad")
    assert source[1] == PAIR
    with pytest.raises(BadRecord, match=r"bad, record 0: keys \['question'\] are none of"):
        source[0]


def test_parquet_of_the_hub(tmp_path, monkeypatch):
    """Which files are asked for; the hub itself is not there in tests."""
    path = write_parquet(tmp_path / "x.parquet", RECORDS[:1])
    hub = {
        ("o/n", None): ["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"],
        ("o/csv", None): ["train.csv"],
        ("o/csv", "refs/convert/parquet"): ["default/train/0001.parquet", "default/train/0000.parquet"],
    }
    asked = []

    def download(repo, name, repo_type, revision):
        asked.append((repo, name, revision))
        assert repo_type == "dataset"
        return str(path)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, repo_type, revision: hub[repo, revision])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert list(open_source("hf:o/n/main:test")) == [PAIR]
    assert list(open_source("hf:o/n")) == [PAIR]
    assert list(open_source("hf:o/csv:train")) == [PAIR, PAIR]
    assert asked == [
        ("o/n", "main/test-00000-of-00001.parquet", None),
        ("o/n", "main/train-00000-of-00001.parquet", None),
        ("o/csv", "default/train/0000.parquet", "refs/convert/parquet"),
        ("o/csv", "default/train/0001.parquet", "refs/convert/parquet"),
    ]
    with pytest.raises(DataError, match="hf:o/gone cannot be read from the hub: KeyError"):
        open_source("hf:o/gone")


@pytest.mark.parametrize(
    ("rest", "name", "split"),
    [
        ("gsm8k", "gsm8k", "train"),
        ("gsm8k:test", "gsm8k", "test"),
        ("gsm8k:1.0.0", "gsm8k:1.0.0", "train"),
        ("gsm8k:1.*.*:test", "gsm8k:1.*.*", "test"),
        ("a/b:1.0.0:train[:80%]", "a/b:1.0.0", "train[:80%]"),
        ("a:train[:5]+test", "a", "train[:5]+test"),
        ("huggingface:gsm8k", "huggingface:gsm8k", "train"),
        ("huggingface:gsm8k:test", "huggingface:gsm8k", "test"),
        ("huggingface:gsm8k/main", "huggingface:gsm8k/main", "train"),
        ("huggingface:gsm8k/main:test", "huggingface:gsm8k/main", "test"),
    ],
)
def test_names_of_tfds_may_hold_colons(rest, name, split):
    assert split_name(rest) == (name, split)


def test_tfds_by_index(tmp_path, monkeypatch):
    features = tfds.features.FeaturesDict(
        {
            "conversations": tfds.features.Sequence({"from": tfds.features.Text(), "value": tfds.features.Text()}),
            "system": tfds.features.Text(),
            "id": np.int64,
        }
    )
    folder = tmp_path / "chats/1.0.0"
    folder.mkdir(parents=True)
    said = []
    for split in ("train", "test"):
        records = []
        for i in range(6 if split == "train" else 2):
            turns = [{"from": "human", "value": f"{split} {i} ü"}, {"from": "gpt", "value": "A"}]
            records.append(features.serialize_example({"conversations": turns, "system": "", "id": i}))
        write_array_record(folder / f"chats-{split}.array_record-00000-of-00001", *records)
        said.append(tfds.core.SplitInfo(name=split, shard_lengths=[len(records)], num_bytes=0))
    files = tfds.core.ShardedFileTemplate(epath.Path(folder), dataset_name="chats", filetype_suffix="array_record")
    tfds.folder_dataset.write_metadata(
        data_dir=folder, features=features, split_infos=said, filename_template=files, check_data=False
    )
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    source = open_source("tfds:chats")
    assert len(source) == 6
    assert source[4] == [{"role": "user", "content": "train 4 ü"}, {"role": "assistant", "content": "A"}]
    assert [m[0]["content"] for m in open_source("tfds:chats:test")] == ["test 0 ü", "test 1 ü"]
    assert [m[0]["content"][:7] for m in open_source("tfds:chats:1.0.0:train[4:]+test")] == [
        "train 4", "train 5", "test 0 ", "test 1 "]  # fmt: skip
    with pytest.raises(DataError, match="tfds:chats:val cannot be read"):
        open_source("tfds:chats:val")
    with pytest.raises(DataError, match="tfds:no_such_set cannot be read: DatasetNotFoundError"):
        open_source("tfds:no_such_set")


@pytest.mark.parametrize(("spec", "package"), [("tfds:x", "tensorflow_datasets"), ("hf:x/y", "pyarrow.parquet")])
def test_a_missing_extra_is_named(spec, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^{spec} needs .*pip install 'marsjax\[data\]'"):
        open_source(spec)
