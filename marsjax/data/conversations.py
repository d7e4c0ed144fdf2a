"""The forms in which data sets write conversations, and the way from each to messages.

`messages`: a list of role and content. `conversations`: a list of from and value (ShareGPT's form). Or a prompt and its
answer under one of PAIRS. A `system` text may stand beside all but `messages`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from marsjax.text.chat import Message, check_messages

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
)
COLUMNS = frozenset({"messages", "conversations", "system", "input", *(key for pair in PAIRS for key in pair)})
FORMS = "messages, " + ", ".join("/".join(pair) for pair in PAIRS) + ", conversations"
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def conversation(record: Any) -> list[Message]:
    """The messages of a record. Raises ValueError with the reason if it has none of the known forms."""
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    if "messages" in record:
        if not isinstance(record["messages"], list):
            raise ValueError("'messages' is not a list")
        check_messages(record["messages"])
        return [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
    if "conversations" in record:
        messages = _turns(record["conversations"])
        if messages and messages[0]["role"] != "system":
            messages[:0] = _system(record)
        check_messages(messages)
        return messages
    for prompt_key, answer_key in PAIRS:
        if prompt_key in record and answer_key in record:
            for key in (prompt_key, answer_key):
                if not isinstance(record[key], str):
                    raise ValueError(f"{key!r} must be a string, but is {type(record[key]).__name__}")
            prompt = record[prompt_key]
            if prompt_key == "instruction" and record.get("input"):
                prompt = f"{prompt}\n\n{record['input']}"
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": record[answer_key]}]
            messages[:0] = _system(record)
            check_messages(messages)
            return messages
    raise ValueError(f"keys {sorted(record)} are none of {FORMS}")


def _system(record: Mapping[str, Any]) -> list[Message]:
    text = record.get("system")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"'system' must be a string, but is {type(text).__name__}")
    return [{"role": "system", "content": text}] if text else []


def _turns(turns: Any) -> list[Message]:
    """ShareGPT's turns; `role` and `content` in their place are taken too."""
    if not isinstance(turns, list):
        raise ValueError("'conversations' is not a list")
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {i} is {type(turn).__name__}, not an object with 'from' and 'value'")
        if "from" not in turn:
            messages.append({key: turn[key] for key in ("role", "content") if key in turn})
        elif not isinstance(turn["from"], str) or turn["from"] not in _ROLES:
            raise ValueError(f"turn {i} is from {turn['from']!r}, which is none of {', '.join(_ROLES)}")
        else:
            messages.append({"role": _ROLES[turn["from"]], "content": turn.get("value")})
    return messages


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as columnar files and TFDS hold it, as JSON would: text for bytes, lists for arrays, and a list of turns
    for turns held by column. Raises ValueError for bytes that are not UTF-8."""
    found = {key: _plain(value) for key, value in record.items()}
    for key in ("messages", "conversations"):
        columns = found.get(key)
        if isinstance(columns, dict) and all(isinstance(items, list) for items in columns.values()):
            if len({len(items) for items in columns.values()}) > 1:
                raise ValueError(f"{key!r} holds columns of different lengths")
            found[key] = [dict(zip(columns, items, strict=True)) for items in zip(*columns.values(), strict=True)]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
