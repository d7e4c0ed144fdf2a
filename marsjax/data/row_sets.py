"""Row sets: the rows of a source by index, with what planning must know of each of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np

from marsjax.data.rows import Row, RowMaker, RowStats
from marsjax.data.sources import DataError, ProblemSource, open_source
from marsjax.text.chat import Message

_SURVEYED = 256  # problems of a generator without a count looked at before training; all else is looked at in full


class Sizes(NamedTuple):
    """What planning must know of n rows. Row i has the supervised spans `span_offsets[i]` to `span_offsets[i + 1]`."""

    tokens: np.ndarray  # [n] int32
    span_starts: np.ndarray  # [m] int32: first supervised token of a span, counted from its row's start
    span_ends: np.ndarray  # [m] int32: the token behind its last
    span_offsets: np.ndarray  # [n + 1] int64


class RowSet(Protocol):
    """The usable rows of a source, by index.

    `stats` counts the conversations looked at, and `fingerprint` stands for their rows. `counted`: the length is that
    of the usable rows, and all of them have been looked at; otherwise a row that does not fit is None.
    """

    name: str
    stats: RowStats
    fingerprint: int
    counted: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row | None: ...

    def sizes(self) -> Sizes:
        """Sizes of all rows, none of them read. Raises DataError where there is no count."""
        ...


class TokenisedRows:
    """The usable rows of a source: tokenised now, or, of a generator without a count, when asked for.

    Raises DataError, with counts, if nothing in them is supervised.
    """

    def __init__(self, source: str | Sequence[list[Message]], maker: RowMaker):
        self.name = source if isinstance(source, str) else type(source).__name__
        self.stats = RowStats()
        self._maker = maker
        self._conversations = open_source(source) if isinstance(source, str) else source
        self._rows: list[Row] | None = None
        seen: Iterable[Row]
        self.counted = not isinstance(self._conversations, ProblemSource) or self._conversations.counted
        if not self.counted:
            some = (self._conversations[i] for i in range(min(_SURVEYED, len(self._conversations))))
            seen = [row for messages in some for row in maker(messages, self.stats)]
        else:
            seen = self._rows = [row for messages in self._conversations for row in maker(messages, self.stats)]
        check_supervised(self.name, self.stats, maker.length)
        self.fingerprint = 0
        for row in seen:
            self.fingerprint = crc32(row.ids.tobytes(), self.fingerprint)

    def __len__(self) -> int:
        return len(self._conversations) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Row | None:
        """A row; None for a generated problem that does not fit the length."""
        if self._rows is not None:
            return self._rows[index]
        return next(iter(self._maker(self._conversations[index])), None)

    def sizes(self) -> Sizes:
        if self._rows is None:
            raise DataError(f"{self.name} has no count, so its rows cannot be planned: {self.name},count=10000")
        return sizes_of(self._rows)


def check_supervised(name: str, stats: RowStats, length: int) -> None:
    """Raises DataError, with counts, if nothing is supervised."""
    if not stats.supervised_tokens:
        raise DataError(
            f"{name}: nothing to train on, no supervised token within {length} tokens a row "
            f"({stats}); check the roles, or raise the length"
        )


def sizes_of(rows: Sequence[Row]) -> Sizes:
    """Sizes of rows in memory."""
    spans = [supervised_runs(row.supervised) for row in rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(starts) for starts, _ in spans], out=offsets[1:])
    nothing = [np.zeros(0, np.int32)]
    return Sizes(
        np.array([len(row.ids) for row in rows], np.int32),
        np.concatenate([starts for starts, _ in spans] or nothing),
        np.concatenate([ends for _, ends in spans] or nothing),
        offsets,
    )


def supervised_runs(supervised: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends (int32, the end exclusive) of the runs of True in [L] bool."""
    edges = np.diff(supervised.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges == 1).astype(np.int32), np.flatnonzero(edges == -1).astype(np.int32)
