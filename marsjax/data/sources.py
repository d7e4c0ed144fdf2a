"""Where conversations come from: JSON-lines files, and the project's own generator.

`jsonl:PATH` (or a path alone): one conversation a line, either `messages`, or a prompt and its answer under one of
PAIRS (GSM8K's `question` and `answer` among them), with an optional `system` text.
`problems:SPLIT` with `,seed=S` and `,count=N`: the generator's; SPLIT is train, validation or test.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marsjax.data.problems import SPLITS, problem
from marsjax.text.chat import Message, check_messages

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
)
_SHOWN = 10  # bad lines an error lists


class DataError(ValueError):
    """The data cannot be used; the message names the file, the lines and the reasons."""


class ProblemSource(Sequence[list[Message]]):
    """The generator's problems as conversations, made when asked for. `counted`: their number was asked for."""

    def __init__(self, split: str, seed: int = 0, count: int | None = None):
        if split not in SPLITS:
            raise DataError(f"problems:{split}: the generator has the splits {', '.join(SPLITS)}")
        self.split, self.seed, self.counted = split, seed, count is not None
        self._size = count if count is not None else 1_000_000 if split == "train" else 2_000
        if self._size < 1:
            raise DataError(f"problems:{split}: count must be at least 1, got {self._size}")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(f"problem {index} of {self._size}")
        made = problem(self.seed, index, self.split)
        return [{"role": "user", "content": made.question}, {"role": "assistant", "content": made.answer}]


def open_source(spec: str) -> Sequence[list[Message]]:
    """The conversations a source names; files are read and checked in full. Raises DataError."""
    kind, colon, rest = spec.partition(":")
    if colon and kind == "problems":
        return _problems(rest)
    if colon and kind == "jsonl":
        return read_jsonl(rest)
    if spec.endswith((".jsonl", ".json")):
        return read_jsonl(spec)
    raise DataError(f"unknown data source {spec!r}; use jsonl:PATH (or a path ending in .jsonl) or problems:SPLIT")


def read_jsonl(path: str | Path) -> list[list[Message]]:
    """All conversations of a file. Every bad line is an error, named with its number and reason."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{file} is a directory; name one JSON-lines file")
    if not file.is_file():
        raise DataError(f"no such data file: {file} (looked in {Path.cwd()})")
    conversations, bad = [], []
    with file.open("rb") as lines:  # as bytes: only a line feed ends a line here, whatever Unicode thinks
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                conversations.append(_conversation(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))))
            except UnicodeDecodeError as error:
                bad.append(f"line {number}: not UTF-8 ({error.reason} at byte {error.start})")
            except json.JSONDecodeError as error:
                bad.append(f"line {number}: not JSON ({error.msg} at column {error.colno})")
            except (ValueError, RecursionError) as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise DataError(f"{file}: {len(bad)} unusable lines\n  " + "\n  ".join(bad[:_SHOWN]) + more)
    if not conversations:
        raise DataError(f"{file} holds no conversations")
    return conversations


def _conversation(line: Any) -> list[Message]:
    if not isinstance(line, dict):
        raise ValueError(f"a {type(line).__name__}, not an object")
    if "messages" in line:
        if not isinstance(line["messages"], list):
            raise ValueError("'messages' is not a list")
        check_messages(line["messages"])
        return [{"role": m["role"], "content": m["content"]} for m in line["messages"]]
    for prompt_key, answer_key in PAIRS:
        if prompt_key in line and answer_key in line:
            prompt = line[prompt_key]
            if prompt_key == "instruction" and line.get("input"):
                prompt = f"{prompt}\n\n{line['input']}"
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": line[answer_key]}]
            if line.get("system"):
                messages.insert(0, {"role": "system", "content": line["system"]})
            for key in (prompt_key, answer_key, *(("system",) if "system" in line else ())):
                if not isinstance(line[key], str):
                    raise ValueError(f"{key!r} must be a string, but is {type(line[key]).__name__}")
            check_messages(messages)
            return messages
    known = "messages, " + ", ".join("/".join(pair) for pair in PAIRS)
    raise ValueError(f"keys {sorted(line)} are none of {known}")


def _problems(rest: str) -> ProblemSource:
    split, *options = rest.split(",")
    values: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("seed", "count") or not value.removeprefix("-").isdigit():
            raise DataError(f"problems:{rest}: {option!r} is not seed=NUMBER or count=NUMBER")
        values[key] = int(value)
    return ProblemSource(split, **values)
