"""`marsjax batch`: a file of OpenAI batch requests, through the engine's queue, answered under their ids."""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from marsjax.decoding.engine import Request
from marsjax.decoding.generator import Generator
from marsjax.decoding.requests import Spec
from marsjax.decoding.statistics import Statistics
from marsjax.serving import openai


@dataclass(frozen=True)
class Line:
    """One line of the input that can be answered."""

    custom_id: str
    url: str
    spec: Spec


@dataclass(frozen=True)
class Summary:
    answered: int
    failed: int
    kept: int  # answers that were in the output already
    statistics: Statistics


def run(
    generator: Generator,
    source: Path,
    target: Path,
    *,
    model: str,
    defaults: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Summary:
    """Answers every line of `source` with one line of `target`, as they get ready.

    The requests that may take longest go first, so that no lane works alone at the end. A line that is no good request
    is answered by an error under its id (or `line-N`), and the others are not affected.

    Args:
      model: name to answer with. defaults: options of `Generator.generate` for requests that do not say them.
      resume: go on with a `target` that is there: its answers are kept, its errors asked again.

    Raises FileNotFoundError or FileExistsError before any work.
    """
    answered = check_files(source, target, resume)
    with target.open("a" if answered is not None else "x", encoding="utf-8") as out:

        def write(custom_id: str, response: Any, error: Any) -> None:
            line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
            out.write(json.dumps(line) + "\n")
            out.flush()

        lines: list[Line] = []
        failed = 0
        for read in _read(generator, source, answered or set(), defaults or {}):
            if isinstance(read, Line):
                lines.append(read)
            else:
                failed += 1
                write(read[0], None, {"code": "invalid_request", "message": read[1]})
        lines.sort(key=lambda line: line.spec.needed, reverse=True)
        engine = generator.engine(min(generator.lanes, max(1, len(lines))))
        pending: dict[Request, Line] = {engine.submit(line.spec): line for line in lines}
        with _bar(progress) as bar:
            task = bar.add_task("", total=len(lines), rate=0.0, per_forward=0.0)
            while not engine.idle:
                for request in engine.turn(32):
                    if not request.ended:
                        continue
                    line = pending.pop(request)
                    if request.result is None:
                        failed += 1
                        write(line.custom_id, None, {"code": "failed", "message": str(request.error)})
                    else:
                        body = openai.response(line.url, line.custom_id, model, request.result)
                        write(line.custom_id, {"status_code": 200, "request_id": body["id"], "body": body}, None)
                    sums = engine.statistics
                    seconds = sums.decode_seconds + sums.prefill_seconds + sums.host_seconds
                    rate = sums.new_tokens / seconds if seconds else 0.0
                    bar.update(task, advance=1, rate=rate, per_forward=sums.tokens_per_forward)
    kept = len(answered or ())
    answers = len(lines) - engine.statistics.failed
    return Summary(answered=answers, failed=failed, kept=kept, statistics=engine.statistics)


def check_files(source: Path, target: Path, resume: bool) -> set[str] | None:
    """Ids that `target` has answers for; None if there is no such file.

    To `resume`, lines with errors and a last line that was not finished are taken out of `target`, so that their
    requests are asked again. A file with any other line is left alone: ValueError.
    """
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file of requests")
    if not target.exists():
        if not target.parent.is_dir():
            raise FileNotFoundError(f"the directory of {target} does not exist")
        return None
    if not resume:
        raise FileExistsError(f"{target} exists; --resume keeps its answers and goes on, or name another file")
    if target.resolve() == source.resolve():
        raise FileExistsError(f"{target} is the input; name another file for the answers")
    whole = []
    *lines, rest = target.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            custom_id, error = answer["custom_id"], answer["error"]
            _ = answer["response"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{target}, line {number}, is no answer to a request: name another file") from None
        if error is None:
            whole.append((str(custom_id), line))
    if rest and not lines:
        raise ValueError(f"{target} holds no answers: name another file")
    partial = target.with_name(target.name + ".partial")
    partial.write_bytes(b"".join(line + b"\n" for _, line in whole))
    partial.replace(target)
    return {custom_id for custom_id, _ in whole}


def _read(
    generator: Generator, source: Path, answered: set[str], defaults: Mapping[str, Any]
) -> Iterator[Line | tuple[str, str]]:
    """Good lines, and (id, message) of bad ones."""
    seen: dict[str, int] = {}
    with source.open(encoding="utf-8-sig", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            custom_id = f"line-{number}"
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError(f"a line must be an object, got {type(line).__name__}")
                if not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
                    raise ValueError("custom_id must be a text")
                custom_id = line["custom_id"]
                if custom_id in seen:
                    first, twice = seen[custom_id], custom_id
                    custom_id = f"line-{number}"  # the id belongs to the answer of the first
                    raise ValueError(f"custom_id {twice!r} is that of line {first} too")
                seen[custom_id] = number
                if custom_id in answered:
                    continue
                if line.get("method", "POST") != "POST":
                    raise ValueError(f"method must be POST, got {line['method']!r}")
                url = line.get("url", openai.CHAT)
                prompt, options = openai.request(url, line.get("body"))
                yield Line(custom_id, url, generator.spec(prompt, **{**defaults, **options}))
            except (ValueError, TypeError, RecursionError) as error:
                yield custom_id, f"line {number}: {error}"


def _bar(shown: bool) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s  {task.fields[per_forward]:.2f} tokens a forward"),
        TimeRemainingColumn(),
        disable=not shown,
    )
