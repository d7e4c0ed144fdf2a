"""Conversations → token rows of a limited length, with a count of what was cut or left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from marsjax.text.chat import Message, check_messages, turn_tokens
from marsjax.text.spans import supervised_spans

NO_ANSWER = "no assistant answer"
LONG_PROMPT = "prompt longer than the limit"
MASK_IN_TEXT = "text contains the mask token"
TURN_IN_TEXT = "text contains a token that marks turns"


@dataclass(frozen=True)
class Row:
    """One document. `complete`: it ends with an end token, so its last answer was not cut."""

    ids: np.ndarray  # [L] int32
    supervised: np.ndarray  # [L] bool
    complete: bool


@dataclass
class RowStats:
    """What became of the conversations: `cut` rows lost the end of an answer, `dropped` counts reasons."""

    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: "RowStats") -> None:
        """Counts the other's conversations too."""
        self.conversations += other.conversations
        self.rows += other.rows
        self.tokens += other.tokens
        self.supervised_tokens += other.supervised_tokens
        self.cut += other.cut
        self.dropped.update(other.dropped)

    def __str__(self) -> str:
        reasons = "".join(f"; {count} dropped: {reason}" for reason, count in sorted(self.dropped.items()))
        return (
            f"{self.conversations} conversations, {self.rows} rows, {self.tokens} tokens, "
            f"{self.supervised_tokens} supervised; {self.cut} answers cut{reasons}"
        )


@dataclass(frozen=True)
class RowMaker:
    """The way from a conversation to rows of at most `length` tokens, the same for training and evaluation.

    A prompt that leaves no room for an answer is dropped. An answer that does not fit is cut, and then carries no end
    token, which would teach a false stop. Rows that hold the mask token as text are dropped: it is never a target. So
    are conversations with a message that holds a turn's opening or end token as text, which teaches false turns.
    """

    tokenizer: PreTrainedTokenizerFast
    length: int
    end_id: int
    mask_id: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, messages: Sequence[Message], stats: RowStats | None = None) -> list[Row]:
        stats = RowStats() if stats is None else stats
        stats.conversations += 1
        check_messages(messages)
        if any(token in message["content"] for message in messages for token in self._turn_tokens):
            stats.dropped[TURN_IN_TEXT] += 1
            return []
        found = supervised_spans(self.tokenizer, messages, self.end_id, **self.template_kwargs)
        if not found:
            stats.dropped[NO_ANSWER] += 1
        rows = []
        for spans in found:
            supervised = np.array(spans.supervised[: self.length], bool)
            if not supervised.any():
                stats.dropped[LONG_PROMPT] += 1
                continue
            size = int(supervised.nonzero()[0][-1]) + 1  # a later prompt that was cut in the middle predicts nothing
            if self.mask_id is not None and self.mask_id in spans.ids[:size]:
                stats.dropped[MASK_IN_TEXT] += 1
                continue
            # The row ends a turn if the next token opens a prompt, or if there is no next token.
            complete = size == len(spans.ids) or not spans.supervised[size]
            row = Row(np.array(spans.ids[:size], np.int32), supervised[:size], complete)
            stats.rows += 1
            stats.tokens += size
            stats.supervised_tokens += int(row.supervised.sum())
            stats.cut += not complete
            rows.append(row)
        return rows

    @cached_property
    def _turn_tokens(self) -> frozenset[str]:
        return turn_tokens(self.tokenizer, self.end_id, **self.template_kwargs)


def fill_last_block(row: Row, block_size: int, end_id: int, length: int) -> Row:
    """The row with supervised end tokens up to the next multiple of the block size (or the length limit).

    The habit of the paper's published code. A cut answer stays as it is: ends behind it would teach a false stop.
    """
    missing = min(-len(row.ids) % block_size, length - len(row.ids))
    if not row.complete or missing <= 0:
        return row
    ids = np.concatenate([row.ids, np.full(missing, end_id, np.int32)])
    return Row(ids, np.concatenate([row.supervised, np.ones(missing, bool)]), True)
