"""What the tokens of a row depend on beside its conversation: two row makers of one identity make the same rows."""

import dataclasses
import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from transformers import PreTrainedTokenizerFast

from marsjax.data.rows import RowMaker
from marsjax.text.mask_token import MASK_TEXT


@dataclass(frozen=True)
class Identity:
    """Fingerprints of the tokenizer and its chat template, and the options of a `RowMaker`."""

    tokenizer: str
    chat_template: str
    template_kwargs: dict[str, Any]
    end_id: int
    mask_id: int | None
    length: int

    @classmethod
    def of(cls, maker: RowMaker) -> "Identity":
        options = dict(maker.template_kwargs)
        template = options.pop("chat_template", maker.tokenizer.chat_template)
        return cls(
            tokenizer_fingerprint(maker.tokenizer),
            _short(json.dumps(template)),
            json.loads(json.dumps(options)),
            maker.end_id,
            maker.mask_id,
            maker.length,
        )

    def differences(self, wanted: "Identity") -> list[str]:
        """In words, what a run that wants another identity would get wrong.

        A run without a mask token may read rows that were made for one: they only lack texts that contain it.
        """
        found = []
        for field in dataclasses.fields(self):
            here, there = getattr(self, field.name), getattr(wanted, field.name)
            if here != there and not (field.name == "mask_id" and there is None):
                found.append(f"{field.name} {here} there, {there} here")
        return found


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of all that turns text into ids; the mask token's place is not part of it, so that a model has one
    fingerprint before and after it got one."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding", "post_processor"):  # rows are encoded without them
        description.pop(name, None)
    description["added_tokens"] = [t for t in description["added_tokens"] if t["content"] != MASK_TEXT]
    vocabulary = description["model"].get("vocab")
    if isinstance(vocabulary, dict):
        vocabulary.pop(MASK_TEXT, None)
    return _short(json.dumps(description, sort_keys=True))


def _short(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
