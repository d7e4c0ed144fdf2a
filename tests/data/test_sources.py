import json

import pytest

from marsjax.data import sources
from marsjax.data.problems import problem
from marsjax.data.sources import DataError, open_source, read_jsonl

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
