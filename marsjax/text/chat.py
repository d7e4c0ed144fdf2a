"""Conversations → token ids, through the model's own chat template."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]  # {"role": str, "content": str}

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without a default system prompt: for base models that come without a template of their own."""

_DAY = datetime(2025, 1, 1)
_SAME_DAY = "".join(f" | replace('%{code}', '{_DAY.strftime('%' + code)}')" for code in "aAbBcdHIjmMpSUwWxXyY")
_SAME_DAY = "{% macro strftime_now(form) %}{{ form | replace('%-', '%')" + _SAME_DAY + " }}{% endmacro %}\n"


class ChatTemplateError(ValueError):
    """The tokenizer has no chat template, or the template refuses the conversation."""


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text, nothing added, nothing cut. Safe to call from several threads.

    The tokenizer object itself resets truncation and padding on every call, which fails while another thread encodes;
    its Rust backend does not.
    """
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend.encode(text, add_special_tokens=False).ids


def render_text(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, generation_prompt: bool, **template_kwargs: Any
) -> str:
    """The conversation as the chat template writes it.

    Raises ChatTemplateError when there is no template or it refuses these messages (say, a role it does not know).
    """
    check_messages(messages)
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            "the tokenizer has no chat template (base models often have none). Set tokenizer.chat_template, or put a "
            "chat_template.jinja into the model's directory; marsjax.text.chat.PLAIN_CHAT_TEMPLATE is a plain one"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt, **template_kwargs
        )
    except (TemplateError, TypeError, KeyError, IndexError) as error:  # what a template may raise, or trip over
        roles = ", ".join(m["role"] for m in messages)
        raise ChatTemplateError(f"the chat template refuses a conversation of roles [{roles}]: {error}") from error
    return cast(str, text)


def render_prompt(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
    """Ids of exactly what inference sends for these messages: the conversation and the opening of an answer."""
    return encode(tokenizer, render_text(tokenizer, messages, generation_prompt=True, **template_kwargs))


def same_day(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Template arguments with which a template that writes today's date (Llama 3's does) writes one day on all days.

    Rows made of it stay what they are when a run goes on later. transformers takes no clock as an argument, so the
    template gets one of its own; it eats no white space of the rest.
    """
    template = tokenizer.chat_template
    asks = isinstance(template, str) and "strftime_now" in template
    return {"chat_template": _SAME_DAY + template} if asks else {}


def turn_end_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token with which the template closes an assistant turn, so the one to train as the end of an answer.

    Base models carry ChatML templates although their end-of-text token is another one; so the template decides, and
    the tokenizer's end token only where the template closes turns with plain text.
    """
    probe = "zq"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": probe}]
    closing = render_text(tokenizer, messages, generation_prompt=False).rpartition(probe)[2]
    ids = encode(tokenizer, closing)
    if ids and _is_special(tokenizer, ids[0]):
        return ids[0]
    if tokenizer.eos_token_id is None:
        raise ChatTemplateError(
            f"no end token: the template closes a turn with {closing!r} and the tokenizer has no eos_token; set one"
        )
    return int(tokenizer.eos_token_id)


def turn_tokens(tokenizer: PreTrainedTokenizerFast, end_id: int, **template_kwargs: Any) -> frozenset[str]:
    """Texts of the special tokens with which the template marks turns, and of the end token.

    Inside a message they would be read as marks: a turn nobody took, or an end in the middle of an answer.
    """
    ids = {*render_prompt(tokenizer, [{"role": "user", "content": "a"}], **template_kwargs), end_id}
    texts = (tokenizer.backend_tokenizer.id_to_token(i) for i in ids if _is_special(tokenizer, i))
    return frozenset(text for text in texts if text)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError, naming the message, unless these are messages of a role and a text each."""
    if not messages:
        raise ValueError("the conversation has no messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} is {type(message).__name__}, not an object with 'role' and 'content'")
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str):
                found = f"{type(value).__name__}" if key in message else "missing"
                raise ValueError(f"message {i}: {key!r} must be a string, but is {found}")
            try:
                value.encode()
            except UnicodeEncodeError as error:  # JSON can escape what UTF-8 cannot hold
                half = f"{value[error.start]!r} at {error.start}"
                raise ValueError(f"message {i}: {key!r} holds half a surrogate pair, {half}: no character") from None


def _is_special(tokenizer: PreTrainedTokenizerFast, token_id: int) -> bool:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().get(token_id)
    return added is not None and added.special
