"""OpenAI's request and response bodies ↔ this package's options and results."""

import time
from collections.abc import Mapping
from typing import Any

from marsjax.decoding.result import Result

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Theirs → ours; what stands for itself in both; what may be there and means nothing here.
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "stop_token_ids": "stop_ids"}
_SAME = ("temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "tau", "measure", "verification")
_IGNORED = ("model", "messages", "prompt", "user", "metadata", "store", "service_tier", "stream_options")
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "best_of": (1, None), "stream": (False, None), "echo": (False, None), "logprobs": (False, 0, None),
    "top_logprobs": (0, None), "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": ({}, None),
    "suffix": ("", None), "tools": ([], None), "response_format": ({"type": "text"}, None),
}  # fmt: skip


def request(url: str, body: Any) -> tuple[Any, dict[str, Any]]:
    """(prompt, options of `Generator.generate`) of a request body. Raises ValueError by the body's names."""
    if url not in (CHAT, COMPLETIONS):
        raise ValueError(f"url must be {CHAT} or {COMPLETIONS}, got {url!r}")
    if not isinstance(body, Mapping):
        raise ValueError(f"body must be an object, got {type(body).__name__}")
    source = "messages" if url == CHAT else "prompt"
    if not body.get(source):
        raise ValueError(f"body needs {source}")
    if url == CHAT and not (isinstance(body[source], list) and all(isinstance(m, Mapping) for m in body[source])):
        raise ValueError("messages must be a list of objects with role and content")
    options: dict[str, Any] = {"raw": url == COMPLETIONS}
    for name, value in body.items():
        if name in _RENAMED:
            if value is not None and _RENAMED[name] in options:
                raise ValueError(f"{name} says again what another parameter says; leave one out")
            if value is not None:
                options[_RENAMED[name]] = value
        elif name in _SAME:
            if value is not None:
                options[name] = value
        elif name in _ONLY:
            if value not in _ONLY[name]:
                raise ValueError(f"{name}={value!r} is not supported; leave it out")
        elif name not in _IGNORED:
            raise ValueError(f"{name} is not a parameter of {url} known here")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return body[source], options


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
