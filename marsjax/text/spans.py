"""Which tokens of a conversation are supervised: found by structure, never by searching the text.

An assistant turn is trained as `ids(prompt exactly as inference sends it) + ids(answer) + end token`: the prompt is the
template's rendering of everything before the turn, and no merge of the tokenizer crosses into the answer. Templates
need no generation markers for this (Qwen2.5's and SmolLM2's have none), and an answer that also occurs in the question
is no trouble.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from marsjax.text.chat import Message, check_messages, encode, render_prompt


@dataclass(frozen=True)
class Spans:
    """`ids` and, of the same length, which of them the model is to learn to write (answers and their end tokens)."""

    ids: list[int]
    supervised: list[bool]


def supervised_spans(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], end_id: int, **template_kwargs: Any
) -> list[Spans]:
    """A conversation as token rows, every non-empty assistant turn supervised exactly once.

    One row as long as the prompt of the next turn begins with the row so far. Where it does not (a template that drops
    earlier reasoning or trims answers, a merge at a boundary), a new row starts with that prompt, so that every answer
    is trained behind exactly what inference sends. No assistant turn behind a message: no rows.
    """
    check_messages(messages)
    rows: list[Spans] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0 or not message["content"]:
            continue
        prompt = render_prompt(tokenizer, messages[:turn], **template_kwargs)
        answer = [*encode(tokenizer, message["content"]), end_id]
        before = rows[-1] if rows else Spans([], [])
        known = len(before.ids)
        continues = known > 0 and prompt[:known] == before.ids
        supervised = before.supervised + [False] * (len(prompt) - known) if continues else [False] * len(prompt)
        row = Spans(prompt + answer, supervised + [True] * len(answer))
        if continues:
            rows[-1] = row
        else:
            rows.append(row)
    return rows
