"""A file of requests in, a file of answers out: every line answered under its id, whatever the others are."""

import json
import resource
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
    """By id, or by the line's number where it has none."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {a["error"]["line"] if a["custom_id"] is None else a["custom_id"]: a for a in lines}
    assert len(found) == len(lines)
    return found


def run(tmp_path, lines, **options):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    options = {"model": "tiny", "progress": False} | options
    return batch_file.run(generator("tiny_mars", lanes=4), source, tmp_path / "out.jsonl", **options)


def test_good_lines_are_answered_and_bad_ones_are_errors(tmp_path):
    good = [line(f"r{i}", max_tokens=1 + i % 7, tau=(1.0, 0.5)[i % 2], ignore_eos=True) for i in range(11)]
    bad = [
        b"{not json",
        b"[1]",
        {"body": {}},
        line("r3"),  # again
        line("far", max_tokens=10**6),
        line("odd", max_tokens="many"),
        line("tools", tools=[{"type": "function"}]),
        line("unknown", topp=1),
        line("chat", url="/v1/chat/completions", messages="hello"),
        line("nowhere", url="/v1/embeddings"),
        line("empty", prompt=[]),
        json.dumps(line("huge", temperature=1)).replace('"temperature": 1', '"temperature": 1' + "0" * 400).encode(),
        b"[" * 100000,
        json.dumps(line("digits", seed=1)).replace('"seed": 1', '"seed": 1' + "0" * 4300).encode(),
        json.dumps(line("latin", stop="\xe9"), ensure_ascii=False).encode("latin-1"),
        line("line-2", stop=5),  # an id as good as any other
        {"custom_id": "", "body": {}},
    ]
    summary = run(tmp_path, [*bad[:3], *good, *bad[3:]])
    assert (summary.answered, summary.failed) == (len(good), len(bad))
    assert summary.first_failure.startswith("line 1: not JSON")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(lines) == len(good) + len(bad)
    found = answers(tmp_path / "out.jsonl")
    for i in range(11):
        body = found[f"r{i}"]["response"]["body"]
        assert body["usage"]["completion_tokens"] == 1 + i % 7
        assert body["choices"][0]["finish_reason"] == "length"
    for custom_id, words in {
        1: "not JSON: Expecting property name enclosed in double quotes at column 2", 2: "a line must be an object",
        3: "custom_id", "far": "max_tokens=1000000 that makes 1000005, but the model has 512 positions",
        "odd": "max_tokens must be an integer of at least 1, got 'many'", "tools": "tools", "unknown": "topp",
        "chat": "messages", "nowhere": "url", "empty": "needs prompt", 15: "custom_id 'r3' is that of line 7 too",
        "huge": "finite number", 24: "not JSON that can be read: nested", 25: "a number has over 4,300 digits",
        26: "not UTF-8: byte 0xe9 at ", "line-2": "stop must be", 28: "custom_id",
    }.items():  # fmt: skip
        assert words in found[custom_id]["error"]["message"], custom_id
        assert not words.startswith("not") or found[custom_id]["error"]["message"].startswith(words)
        assert found[custom_id]["response"] is None
    numbers = sorted(a["error"]["line"] for a in found.values() if a["error"])
    assert numbers == [1, 2, 3, *range(15, 29)]


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


@pytest.mark.parametrize("text", ["not json\n", json.dumps(line("a")) + "\n", "half a line", "[" * 10**5 + "\n"])
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


def test_resume_asks_lines_without_an_id_again(tmp_path):
    lines = [line("line-2"), b"no json", line("line-2"), line("line-4", max_tokens=0)]
    for resume, kept in ((False, 0), (True, 1), (True, 1)):
        summary = run(tmp_path, lines, resume=resume)
        assert (summary.kept, summary.answered, summary.failed) == (kept, 1 - kept, 3)
        found = answers(tmp_path / "out.jsonl")
        assert {i for i in found if found[i]["error"]} == {2, 3, "line-4"}
        assert found["line-2"]["response"]["status_code"] == 200


def test_nothing_is_rewritten_before_there_is_something_to_write(tmp_path):
    run(tmp_path, [line("a"), line("b", max_tokens=0)])
    out = tmp_path / "out.jsonl"
    before = out.read_bytes()
    assert batch_file.check_files(tmp_path / "in.jsonl", out, True) == {"a"}
    assert out.read_bytes() == before
    run(tmp_path, [line("a")], resume=True)  # of which all is answered
    assert out.read_bytes() == before
    run(tmp_path, [line("a"), line("b", max_tokens=1)], resume=True)
    assert [i for i, a in answers(out).items() if a["error"] is None] == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_linked_targets_keep_their_link_and_mode(tmp_path):
    real, link = tmp_path / "elsewhere" / "real.jsonl", tmp_path / "out.jsonl"
    real.parent.mkdir()
    link.symlink_to(real)
    run(tmp_path, [line("a", max_tokens=0), line("b")])
    real.chmod(0o640)
    run(tmp_path, [line("a", max_tokens=1), line("b")], resume=True)
    assert link.readlink() == real
    assert real.stat().st_mode & 0o777 == 0o640
    assert [i for i, a in answers(real).items() if a["error"] is None] == ["b", "a"]
    assert [p.name for p in real.parent.iterdir()] == ["real.jsonl"]


def test_a_full_disk(tmp_path):
    """Stands in for it: a limit of the size of files, at which writes are cut short and then fail."""
    lines = [line(f"r{i}", max_tokens=1, seed=0) for i in range(6)]
    run(tmp_path, lines)
    out = tmp_path / "out.jsonl"
    limit = len(out.read_bytes()) * 5 // 12  # two lines and a half
    out.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"out.jsonl cannot be written: File too large.*--resume goes on"):
            run(tmp_path, lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(answers(out)) == 2  # and no half
    summary = run(tmp_path, lines, resume=True)
    assert (summary.kept, summary.answered) == (2, 4)
    assert sorted(answers(out)) == [f"r{i}" for i in range(6)]


def test_a_rewriting_that_fails_leaves_the_answers(tmp_path):
    lines = [line("a", max_tokens=1), *(line(f"r{i}", max_tokens=1) for i in range(6))]
    run(tmp_path, [line("a", max_tokens=0), *lines[1:]])
    out = tmp_path / "out.jsonl"
    before = out.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"out.jsonl cannot be rewritten: File too large; it is as it was"):
            run(tmp_path, lines, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_unfit_files(tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl does not exist"):
        batch_file.check_files(tmp_path / "no.jsonl", out, False)
    with pytest.raises(OSError, match="is not a file of requests"):
        batch_file.check_files(tmp_path, out, False)
    source = tmp_path / "in.jsonl"
    source.write_text("")
    with pytest.raises(FileNotFoundError, match="directory"):
        batch_file.check_files(source, tmp_path / "no" / "out.jsonl", False)
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="/dev/null is not a regular file"):
            batch_file.check_files(source, Path("/dev/null"), resume)
        with pytest.raises(FileExistsError, match="is the input"):
            batch_file.check_files(source, source, resume)
    out.write_text(json.dumps({"custom_id": None, "response": {}, "error": None}) + "\n")
    with pytest.raises(ValueError, match="line 1, is no answer"):
        batch_file.check_files(source, out, True)
