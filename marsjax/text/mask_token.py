"""The mask token `<|mask|>`: which embedding row it takes, and its entry in the tokenizer.

MARS (arXiv 2604.07023, section 3) appends mask tokens to a prefix; checkpoints have none. Many have spare embedding
rows, though (Qwen2.5: 151,665 known tokens, 151,936 rows); others grow to the next multiple of 128.
"""

import json
from dataclasses import dataclass
from typing import Protocol

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

MASK_TEXT = "<|mask|>"
ROW_MULTIPLE = 128


class HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class MaskPlan:
    """`mask_id`, the rows the embedding table must have for it, and whether the tokenizer just gained the token."""

    mask_id: int
    new_vocab_size: int
    added: bool


def find_mask_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Id of `<|mask|>`, or None where the tokenizer does not know it."""
    return tokenizer.backend_tokenizer.token_to_id(MASK_TEXT)


def ensure_mask_token(tokenizer: PreTrainedTokenizerFast, config: HasVocabulary) -> MaskPlan:
    """Finds the mask token, or adds it to the tokenizer (in place) on the first row behind all known tokens.

    `config.vocab_size` is the number of rows of the embedding table. A tokenizer that already knows more tokens than
    the table has rows is an error.
    """
    rows = config.vocab_size
    known = find_mask_id(tokenizer)
    ids = set(tokenizer.get_vocab().values())
    highest = max(ids)
    if highest >= rows:
        raise ValueError(
            f"the tokenizer knows ids up to {highest}, but the embedding table has only {rows} rows: tokenizer and "
            "weights do not belong together; load both from the same checkpoint"
        )
    if known is not None:
        return MaskPlan(known, rows, added=False)
    wanted = highest + 1
    if len(ids) == wanted:
        tokenizer.add_tokens([AddedToken(MASK_TEXT, special=True, normalized=False)], special_tokens=True)
    else:  # ids with holes: on loading, the library would count tokens instead of looking at ids
        _place(tokenizer, wanted)
    got = find_mask_id(tokenizer)
    if got != wanted:
        raise ValueError(f"the tokenizer put {MASK_TEXT} on id {got}, but the first free row is {wanted}")
    new_rows = rows if wanted < rows else -(-(wanted + 1) // ROW_MULTIPLE) * ROW_MULTIPLE
    return MaskPlan(wanted, new_rows, added=True)


def _place(tokenizer: PreTrainedTokenizerFast, wanted: int) -> None:
    """Rebuilds the tokenizer's backend with the mask token on a given id, which its model's vocabulary may name."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        raise ValueError(
            f"the tokenizer's ids have holes and its model ({description['model'].get('type')}) cannot place "
            f"{MASK_TEXT} on id {wanted}; add the token to the tokenizer's files by hand"
        )
    vocabulary[MASK_TEXT] = wanted
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description["added_tokens"].append({"id": wanted, "content": MASK_TEXT, **flags})
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(description))
