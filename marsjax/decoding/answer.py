"""A row's tokens on the host, as they come: text, stop strings, run lengths."""

import bisect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from marsjax.text.streaming import Detokenizer, StopStrings


class Answer:
    """Grows by accepted tokens until an end token, a stop string or the limit ends it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], ends: Sequence[int]):
        self.ids: list[int] = []
        self.stop: int | str | None = None
        self._emitted_by: list[int] = []
        self._ends = frozenset(ends)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(stops) if stops else None
        self._decoded = [0]  # characters decoded from the first k ids
        self._text: list[str] = []
        self._shown = 0  # characters of it

    @property
    def text(self) -> str | None:
        return None if self._detokenizer is None else "".join(self._text)

    @property
    def chunks(self) -> list[int]:
        """Length of each accepted run, of returned tokens."""
        return [len(list(run)) for _, run in groupby(self._emitted_by)]

    @property
    def forwards(self) -> int:
        """The row's forwards up to the one that gave its last returned token."""
        return self._emitted_by[-1] if self._emitted_by else 0

    @property
    def final(self) -> int:
        """How many ids nothing can take back: all, or with stop strings those whose text is shown."""
        if self._stops is None:
            return len(self.ids)
        return bisect.bisect_left(self._decoded, self._shown)

    def push(self, ids: Sequence[int], emitted_by: Sequence[int]) -> str:
        """Take tokens and the number of the forward that gave each; returns the text that became final."""
        text = []
        for token, forward in zip(ids, emitted_by, strict=True):
            if self.stop is not None:
                break
            self.ids.append(token)
            self._emitted_by.append(forward)
            self._decoded.append(self._decoded[-1])
            if self._detokenizer is not None:  # an end token that is no special one has text
                text.append(self._show(self._detokenizer.push([token])))
            if token in self._ends and self.stop is None:
                self.stop = token
                text.append(self.finish())
        return "".join(text)

    def finish(self) -> str:
        """The text still held back once no more tokens will come."""
        if self._detokenizer is None:
            return ""
        text = self._show(self._detokenizer.finish())
        if self._stops is not None and self._stops.stopped is None:
            text += self._add(self._stops.finish())
        return text

    def _show(self, text: str) -> str:
        self._decoded[-1] += len(text)
        if self._stops is not None and self._stops.stopped is None:
            text = self._add(self._stops.push(text))
            if self._stops.stopped is not None:
                self.stop = self._stops.stopped
                kept = self.final
                del self.ids[kept:], self._emitted_by[kept:]
        else:
            text = self._add(text) if self._stops is None else ""
        return text

    def _add(self, text: str) -> str:
        self._text.append(text)
        self._shown += len(text)
        return text
