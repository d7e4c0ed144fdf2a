"""OpenAI's request and response bodies ↔ this package's options and results."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from marsjax.decoding.result import Result

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Theirs → ours; what stands for itself in both; what may be there and means nothing here.
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "stop_token_ids": "stop_ids"}
_SAME = ("temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "tau", "measure", "verification")
_OURS = {name: name for name in _SAME} | _RENAMED
_LISTS = ("stop", "stop_token_ids")
_IGNORED = (
    "model", "messages", "prompt", "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls",
)  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "best_of": (1, None), "stream": (False, None), "echo": (False, None), "logprobs": (False, 0, None),
    "top_logprobs": (0, None), "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": ({}, None),
    "suffix": ("", None), "tools": ([], None), "tool_choice": ("none", None),
    "response_format": ({"type": "text"}, None),
}  # fmt: skip


def request(url: str, body: Any) -> tuple[Any, dict[str, Any]]:
    """(prompt, options of `Generator.generate`) of a request body. Raises ValueError by the body's names."""
    if url not in (CHAT, COMPLETIONS):
        raise ValueError(f"url must be {CHAT} or {COMPLETIONS}, got {_shown(url)}")
    if not isinstance(body, Mapping):
        raise ValueError(f"body must be an object, got {type(body).__name__}")
    prompt = _messages(body.get("messages")) if url == CHAT else _prompt(body.get("prompt"))
    options: dict[str, Any] = {"raw": url == COMPLETIONS}
    for name, value in body.items():
        if name in _OURS:
            if isinstance(value, list) and name not in _LISTS:  # here, several values are one for each prompt
                raise ValueError(f"{name} must be one value, got {_shown(value)}")
            if value is None:
                continue
            if _OURS[name] in options:
                raise ValueError(f"{name} says again what another parameter says; leave one out")
            options[_OURS[name]] = value
        elif name in _ONLY:
            if value not in _ONLY[name]:
                raise ValueError(f"{name}={_shown(value)} is not supported; leave it out")
        elif name not in _IGNORED:
            raise ValueError(f"{name} is not a parameter of {url} known here")
    return prompt, options


def in_names_of(body: Mapping[str, Any], message: str) -> str:
    """A message about our options, by the names that this body has for them."""
    theirs: dict[str, str] = {}
    for name, ours in _RENAMED.items():
        if ours not in theirs or body.get(name) is not None:
            theirs[ours] = name
    return re.sub(rf"\b({'|'.join(theirs)})\b", lambda found: theirs[found[0]], message)


def _prompt(prompt: Any) -> Any:
    """A text or token ids, also if they come as the only entry of a list."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"prompt holds {len(prompt)} prompts; make each a request of its own")
        prompt = prompt[0]
    if not prompt:
        raise ValueError("body needs prompt")
    is_ids = isinstance(prompt, list) and not isinstance(prompt[0], str | list | Mapping)
    if not (isinstance(prompt, str) or is_ids):
        raise ValueError(f"prompt must be a text or a list of token ids, got {_shown(prompt)}")
    return prompt


def _messages(messages: Any) -> list[Any]:
    """The messages, each content a text."""
    if not messages:
        raise ValueError("body needs messages")
    if not (isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)):
        raise ValueError("messages must be a list of objects with role and content")
    return [
        {**m, "content": _joined(i, m["content"])} if isinstance(m.get("content"), list) else m
        for i, m in enumerate(messages)
    ]


def _joined(i: int, parts: list[Any]) -> str:
    if not parts:
        raise ValueError(f"message {i}: 'content' is a list without parts")
    for part in parts:
        if not isinstance(part, Mapping):
            raise ValueError(f"message {i}: parts of 'content' must be objects with type and text, got {_shown(part)}")
        if part.get("type") != "text":
            raise ValueError(f"message {i}: parts of type {_shown(part.get('type'))} are not supported, only 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"message {i}: 'text' of a part must be a string, got {_shown(part.get('text'))}")
    return "".join(part["text"] for part in parts)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def response(url: str, identifier: str, model: str, result: Result) -> dict[str, Any]:
    """A response body; counts of forwards are under `marsjax`."""
    if url == CHAT:
        kind, prefix = "chat.completion", "chatcmpl"
        answer: dict[str, Any] = {"message": {"role": "assistant", "content": result.text}}
    else:
        kind, prefix, answer = "text_completion", "cmpl", {"text": result.text}
    return {
        "id": f"{prefix}-{identifier}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **answer, "logprobs": None, "finish_reason": result.finish_reason}],
        "usage": {
            "prompt_tokens": len(result.prompt_ids),
            "completion_tokens": len(result.ids),
            "total_tokens": len(result.prompt_ids) + len(result.ids),
        },
        "marsjax": {
            "forwards": result.forwards,
            "tokens_per_forward": result.tokens_per_forward,
            "seed": result.seed,
        },
    }
