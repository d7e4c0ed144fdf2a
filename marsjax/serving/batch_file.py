"""`marsjax batch`: a file of OpenAI batch requests, through the engine's queue, answered under their ids."""

import codecs
import contextlib
import json
import os
import shutil
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
class Bad:
    """One line of the input that cannot."""

    custom_id: str | None  # None: it has none of its own
    number: int
    message: str


@dataclass(frozen=True)
class Summary:
    answered: int
    failed: int
    kept: int  # answers that were in the output already
    statistics: Statistics
    first_failure: str | None = None  # under which id, and why


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
    is answered by an error under its id, and the others are not affected. Where it has no id, or one that an earlier
    line has, `custom_id` is null, so that no id is answered twice; `error.line` is its number.

    Args:
      model: name to answer with. defaults: options of `Generator.generate` for requests that do not say them.
      resume: go on with a `target` that is there: its answers are kept, its errors asked again.

    Raises OSError or ValueError before any work if the files are not as they should be, and OSError where the answers
    cannot be written; those written until then are good to `resume` from.
    """
    answered = check_files(source, target, resume)
    lines: list[Line] = []
    bad: list[Bad] = []
    for read in _read(generator, source, answered or set(), defaults or {}):
        if isinstance(read, Line):
            lines.append(read)
        else:
            bad.append(read)
    lines.sort(key=lambda line: line.spec.needed, reverse=True)
    engine = generator.engine(min(generator.lanes, max(1, len(lines))))
    pending: dict[Request, Line] = {engine.submit(line.spec): line for line in lines}
    if answered is not None and (lines or bad):
        _drop_errors(target)
    failed, first_failure = len(bad), None
    # Unbuffered: closing a buffer would try again to write what did not fit, and tell of that instead.
    with target.resolve().open("ab" if answered is not None else "xb", buffering=0) as out:

        def write(custom_id: str | None, response: Any, error: Any) -> None:
            nonlocal first_failure
            if error is not None and first_failure is None:
                which = custom_id if custom_id is not None else f"line {error['line']}"
                first_failure = f"{which}: {error['message']}"
            line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
            rest, end = memoryview(json.dumps(line).encode() + b"\n"), out.seek(0, os.SEEK_END)
            try:
                while rest:
                    rest = rest[out.write(rest) :]
            except OSError as reason:
                with contextlib.suppress(OSError):
                    out.truncate(end)  # to whole lines
                raise OSError(
                    f"{target} cannot be written: {reason.strerror}. The answers so far are in it; --resume goes on"
                ) from reason

        for one in bad:
            write(one.custom_id, None, {"code": "invalid_request", "message": one.message, "line": one.number})
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
    return Summary(
        answered=answers, failed=failed, kept=kept, statistics=engine.statistics, first_failure=first_failure
    )


def check_files(source: Path, target: Path, resume: bool) -> set[str] | None:
    """Ids that `target` has answers for; None if there is no such file. Changes nothing.

    A file to `resume` that has other lines than answers is refused: ValueError.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    if not source.is_file():
        raise OSError(f"{source} is not a file of requests")
    if not target.exists():
        if not target.resolve().parent.is_dir():
            raise FileNotFoundError(f"the directory of {target} does not exist")
        return None
    if not target.is_file():
        raise FileExistsError(f"{target} is not a regular file; answers are written to one, so that they can be kept")
    if target.samefile(source):
        raise FileExistsError(f"{target} is the input; name another file for the answers")
    if not resume:
        raise FileExistsError(f"{target} exists; --resume keeps its answers and goes on, or name another file")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{target} may not be written")
    return {custom_id for _, custom_id in _answers(target) if custom_id is not None}


def _answers(target: Path) -> Iterator[tuple[bytes, str | None]]:
    """Lines, each with the id it answers; None for errors and for a last line that was not finished."""
    with target.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if number == 1:
                    raise ValueError(f"{target} holds no answers: name another file")
                yield line, None
                return
            try:
                answer = json.loads(line)
                custom_id, error, _ = answer["custom_id"], answer["error"], answer["response"]
                if error is None and not isinstance(custom_id, str):
                    raise TypeError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(f"{target}, line {number}, is no answer to a request: name another file") from None
            yield line, custom_id if error is None else None


def _drop_errors(target: Path) -> None:
    """Takes out what is asked again: errors, and a last line that was not finished. At any moment the file is whole."""
    if all(custom_id is not None for _, custom_id in _answers(target)):
        return
    file = target.resolve()  # replaced where it lies, so that links to it stay
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as out:
            shutil.copymode(file, partial)
            out.writelines(line for line, custom_id in _answers(target) if custom_id is not None)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except OSError as reason:
        raise OSError(f"{target} cannot be rewritten: {reason.strerror}; it is as it was") from reason
    finally:
        partial.unlink(missing_ok=True)


def _read(generator: Generator, source: Path, answered: set[str], defaults: Mapping[str, Any]) -> Iterator[Line | Bad]:
    seen: dict[str, int] = {}
    with source.open("rb") as file:
        for number, text in enumerate(file, 1):
            if number == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            if not text.strip():
                continue
            custom_id = None
            try:
                line = _object(text)
                claimed = line.get("custom_id")
                if not isinstance(claimed, str) or not claimed:
                    raise ValueError("custom_id must be a text")
                if claimed in seen:
                    raise ValueError(f"custom_id {claimed!r} is that of line {seen[claimed]} too")
                custom_id = claimed
                seen[custom_id] = number
                if custom_id in answered:
                    continue
                if line.get("method", "POST") != "POST":
                    raise ValueError(f"method must be POST, got {line['method']!r}")
                url = line.get("url", openai.CHAT)
                prompt, options = openai.request(url, line.get("body"))
                try:
                    spec = generator.spec(prompt, **{**_without_tau(defaults, options), **options})
                except (ValueError, TypeError) as error:
                    raise ValueError(openai.in_names_of(line["body"], str(error))) from None
                yield Line(custom_id, url, spec)
            except (ValueError, TypeError, RecursionError) as error:
                yield Bad(custom_id, number, str(error))


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError saying what it is instead."""
    try:
        line = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{text[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    except ValueError:  # Python converts no number that long
        raise ValueError("a number has over 4,300 digits") from None
    if not isinstance(line, dict):
        raise ValueError(f"a line must be an object, got {type(line).__name__}")
    return line


def _without_tau(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A default τ is meant for the default measure: as nats of entropy 0.95 would accept nearly everything."""
    return {name: value for name, value in defaults.items() if name != "tau" or "measure" not in options}


def _bar(shown: bool) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s  {task.fields[per_forward]:.2f} tokens a forward"),
        TimeRemainingColumn(),
        disable=not shown,
    )
