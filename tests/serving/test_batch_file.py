"""A file of requests in, a file of answers out: every line answered under its id, whatever the others are."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "decoding"))
from decoding_helpers import generator

from marsjax.serving import batch_file

PROMPT = [50, 3, 9, 21, 51]


def line(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", "prompt": PROMPT} | body}


def answers(path):
    return {a["custom_id"]: a for a in map(json.loads, path.read_text().splitlines())}


def run(tmp_path, lines, **options):
    source = tmp_path / "in.jsonl"
    source.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    options = {"model": "tiny", "progress": False} | options
    return batch_file.run(generator("tiny_mars", lanes=4), source, tmp_path / "out.jsonl", **options)


def test_good_lines_are_answered_and_bad_ones_are_errors(tmp_path):
    good = [line(f"r{i}", max_tokens=1 + i % 7, tau=(1.0, 0.5)[i % 2], ignore_eos=True) for i in range(11)]
    bad = [
        "{not json",
        "[1]",
        {"body": {}},
        line("r3"),  # again
        line("far", max_tokens=10**6),
        line("odd", max_tokens="many"),
        line("tools", tools=[{"type": "function"}]),
        line("unknown", topp=1),
        line("chat", url="/v1/chat/completions", messages="hello"),
        line("nowhere", url="/v1/embeddings"),
        line("empty", prompt=[]),
        json.dumps(line("huge", temperature=1)).replace('"temperature": 1', '"temperature": 1' + "0" * 400),
        "[" * 100000,
    ]
    summary = run(tmp_path, [*bad[:3], *good, *bad[3:]])
    assert (summary.answered, summary.failed) == (len(good), len(bad))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(lines) == len(good) + len(bad)
    found = answers(tmp_path / "out.jsonl")
    for i in range(11):
        body = found[f"r{i}"]["response"]["body"]
        assert body["usage"]["completion_tokens"] == 1 + i % 7
        assert body["choices"][0]["finish_reason"] == "length"
    for custom_id, words in {
        "line-1": "line 1", "line-2": "must be an object", "line-3": "custom_id", "far": "positions",
        "odd": "max_new_tokens", "tools": "tools", "unknown": "topp", "chat": "messages", "nowhere": "url",
        "empty": "needs prompt", "line-15": "is that of line 7 too", "huge": "finite number",
    }.items():  # fmt: skip
        assert words in found[custom_id]["error"]["message"], custom_id
        assert found[custom_id]["response"] is None


def test_resume_keeps_answers_and_asks_the_rest(tmp_path):
    lines = [line(f"r{i}", max_tokens=3) for i in range(5)]
    run(tmp_path, lines)
    out = tmp_path / "out.jsonl"
    with pytest.raises(FileExistsError, match="--resume"):
        run(tmp_path, lines)
    kept = out.read_text().splitlines()
    failed = json.dumps({"id": "x", "custom_id": "r4", "response": None, "error": {"code": "failed"}})
    out.write_text("\n".join([*kept[:3], failed, kept[3][: len(kept[3]) // 2]]))  # an error and a cut line
    summary = run(tmp_path, lines, resume=True)
    assert (summary.kept, summary.answered, summary.failed) == (3, 2, 0)
    assert sorted(answers(out)) == [f"r{i}" for i in range(5)]
    assert out.read_text().splitlines()[:3] == kept[:3]


@pytest.mark.parametrize("text", ["not json\n", json.dumps(line("a")) + "\n", "half a line"])
def test_resume_leaves_other_files_alone(tmp_path, text):
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(ValueError, match="name another file"):
        run(tmp_path, [line("a")], resume=True)
    assert out.read_text() == text


def test_defaults_are_for_requests_that_do_not_say(tmp_path):
    run(tmp_path, [line("a"), line("b", max_tokens=2)], defaults={"max_new_tokens": 5, "ignore_eos": True})
    found = answers(tmp_path / "out.jsonl")
    assert [found[i]["response"]["body"]["usage"]["completion_tokens"] for i in "ab"] == [5, 2]


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="requests"):
        batch_file.check_files(tmp_path / "no.jsonl", tmp_path / "out.jsonl", False)
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match="directory"):
        batch_file.check_files(tmp_path / "in.jsonl", tmp_path / "no" / "out.jsonl", False)
