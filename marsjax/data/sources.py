"""Where conversations come from: files, data sets, and the project's own generator.

`jsonl:PATH` (or a path alone): one conversation a line. `arrayrecord:PATH`: one a record, written as such a line.
`tfds:NAME[:SPLIT]`: tensorflow-datasets. `hf:REPO[:SPLIT]`: parquet files of the Hugging Face hub, or of a directory.
`problems:SPLIT` with `,seed=S` and `,count=N`: the generator's; SPLIT is train, validation or test.
The forms of a conversation: marsjax.data.conversations.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marsjax.data.conversations import conversation, plain
from marsjax.data.problems import SPLITS, problem
from marsjax.text.chat import Message

_SHOWN = 10  # bad lines an error lists


class DataError(ValueError):
    """The data cannot be used; the message names the file, the lines and the reasons."""


class BadRecord(DataError):
    """One record of a source holds no conversation; `reason` says why."""

    def __init__(self, source: str, index: int, reason: str):
        super().__init__(f"{source}, record {index}: {reason}")
        self.reason = reason


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


class Records(Sequence[list[Message]]):
    """Conversations read by index, none before it is asked for. A subclass gives `_read` and the count.

    Nothing is checked up front: a record that holds no conversation raises BadRecord when it is read.
    """

    def __init__(self, name: str, count: int):
        if not count:
            raise DataError(f"{name} holds no conversations")
        self.name = name
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"record {index} of {self._count} of {self.name}")
        try:
            record = self._read(int(index))
        except (RuntimeError, OSError) as error:  # a damaged file, not a bad record
            raise DataError(f"{self.name}, record {index} cannot be read: {error}") from error
        try:
            return conversation(parse(record) if isinstance(record, bytes) else plain(record))
        except (ValueError, RecursionError) as error:
            raise BadRecord(self.name, index, str(error)) from None

    def _read(self, index: int) -> Any:
        """A record: bytes of JSON, or a mapping of columns."""
        raise NotImplementedError


class JsonLines(Records):
    """The lines of a file by index, of which only the places are in memory."""

    def __init__(self, path: str | Path):
        self._file = _data_file(path)
        places, place = [], 0
        with self._file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    places.append(place)
                place += len(line)
        self._places = np.array(places, np.int64)
        self._open: Any = None
        super().__init__(f"jsonl:{path}", len(places))

    def _read(self, index: int) -> bytes:
        if self._open is None:
            self._open = self._file.open("rb")
        self._open.seek(self._places[index])
        line = self._open.readline()
        return line.removeprefix(codecs.BOM_UTF8) if index == 0 else line


def open_source(spec: str, *, in_full: bool = True) -> Sequence[list[Message]]:
    """The conversations a source names. Raises DataError; ImportError naming what to install where a source needs it.

    JSON-lines files are read and checked in full, unless `in_full` is False; other sources are read when asked for.
    """
    kind, colon, rest = spec.partition(":")
    if colon and kind == "problems":
        return _problems(rest)
    if colon and kind == "jsonl":
        return read_jsonl(rest) if in_full else JsonLines(rest)
    if colon and kind == "arrayrecord":
        from marsjax.data.arrayrecord import ArrayRecords

        return ArrayRecords(rest)
    if colon and kind == "tfds":
        from marsjax.data.tfds_source import TfdsRecords

        return TfdsRecords(rest)
    if colon and kind == "hf":
        from marsjax.data.hf_source import ParquetRecords

        return ParquetRecords(rest)
    if colon and kind == "rows":
        raise DataError(
            f"{spec} holds token rows, not conversations: it can be data.train or evaluation.data, but neither built "
            "again nor decoded (evaluation.decode_prompts)"
        )
    if spec.endswith((".jsonl", ".json")):
        return read_jsonl(spec) if in_full else JsonLines(spec)
    raise DataError(
        f"unknown data source {spec!r}; use jsonl:PATH (or a path ending in .jsonl), arrayrecord:PATH, "
        "tfds:NAME[:SPLIT], hf:REPO[:SPLIT], problems:SPLIT, or rows:DIRECTORY for what marsjax data build wrote"
    )


def read_jsonl(path: str | Path) -> list[list[Message]]:
    """All conversations of a file. Every bad line is an error, named with its number and reason."""
    file = _data_file(path)
    conversations, bad = [], []
    with file.open("rb") as lines:  # as bytes: only a line feed ends a line here, whatever Unicode thinks
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                conversations.append(conversation(parse(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)))
            except (ValueError, RecursionError) as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise DataError(f"{file}: {len(bad)} unusable lines\n  " + "\n  ".join(bad[:_SHOWN]) + more)
    if not conversations:
        raise DataError(f"{file} holds no conversations")
    return conversations


def parse(line: bytes) -> Any:
    """JSON of UTF-8 bytes. Raises ValueError with the reason."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None


def missing_extra(what: str, package: str) -> ImportError:
    """The error of a source or command whose packages are not installed."""
    return ImportError(f"{what} needs {package}, which is not installed: pip install 'marsjax[data]'")


def _data_file(path: str | Path) -> Path:
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{file} is a directory; name one JSON-lines file")
    if not file.is_file():
        raise DataError(f"no such data file: {file} (looked in {Path.cwd()})")
    return file


def _problems(rest: str) -> ProblemSource:
    split, *options = rest.split(",")
    values: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("seed", "count") or not value.removeprefix("-").isdigit():
            raise DataError(f"problems:{rest}: {option!r} is not seed=NUMBER or count=NUMBER")
        values[key] = int(value)
    return ProblemSource(split, **values)
