"""A model in memory with what belongs to it: tokenizer, ends of generation, mask token, the source's own fields."""

import dataclasses
from typing import Any

from marsjax.models import Decoder
from marsjax.weights.tensors import CheckpointError


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about ending and padding.

    `eos_ids`: every id that ends a text, the first is the usual one. `pad_id` differs from it; None only where the
    files name no padding, and no special token could stand for it. `fields`: the other fields of
    generation_config.json, kept for export.
    """

    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    bos_id: int | None = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def with_end(self, end_id: int) -> "GenerationDefaults":
        """The same with `end_id`, such as the token training put behind answers, as the first end."""
        others = tuple(i for i in self.eos_ids if i != end_id)
        pad_id = self.pad_id if self.pad_id != end_id else next(iter(others), None)
        return dataclasses.replace(self, eos_ids=(end_id, *others), pad_id=pad_id)

    def to_hf(self) -> dict[str, Any]:
        """The fields of a generation_config.json."""
        if self.eos_ids and self.pad_id == self.eos_ids[0]:
            raise ValueError(
                f"pad_id {self.pad_id} is also the end token: padding would be read as an end; choose another pad_id"
            )
        ids = {
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None),
            "pad_token_id": self.pad_id,
        }
        return {**self.fields, **{name: value for name, value in ids.items() if value is not None}}


@dataclasses.dataclass
class Pretrained:
    """What `load` gives and `save` takes. `hf_config` holds the fields of the source's config.json."""

    model: Decoder
    tokenizer: Any = None
    generation: GenerationDefaults = dataclasses.field(default_factory=GenerationDefaults)
    mask_id: int | None = None
    hf_config: dict[str, Any] = dataclasses.field(default_factory=dict)


def generation_defaults(
    hf_generation: dict[str, Any], hf_config: dict[str, Any], tokenizer: Any, vocab_size: int, mask_id: int | None
) -> GenerationDefaults:
    """generation_config.json wins over config.json, which wins over the tokenizer; an end may be an id or a list.

    Raises CheckpointError, naming the file, for what is neither: an end that is not known would never end a text.
    """

    def named_by(key: str) -> list[list[int]]:
        """Of each source, in order of rank."""
        files = (("generation_config.json", hf_generation), ("config.json", hf_config))
        found = [_ids(f"{key} of {file}", fields.get(key)) for file, fields in files]
        return [*found, _ids(key, getattr(tokenizer, key, None))]

    ends, starts = (next(filter(None, named_by(key)), []) for key in ("eos_token_id", "bos_token_id"))
    named = [i for ids in named_by("pad_token_id") for i in ids]
    # A pad that is the end token cannot be kept: another token that no text should hold stands in.
    special = [i for name in ("unk_token_id", "all_special_ids") for i in _ids(name, getattr(tokenizer, name, None))]
    pads = [i for i in named if i not in ends[:1]] + [i for i in special if i not in ends]
    pads += [] if mask_id is None else [mask_id]
    pads = [i for i in pads if 0 <= i < vocab_size]  # some configs say -1
    named_here = ("eos_token_id", "bos_token_id", "pad_token_id")
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(ends)),
        pad_id=next(iter(pads), None),
        bos_id=next(iter(starts), None),
        fields={name: value for name, value in hf_generation.items() if name not in named_here},
    )


def _ids(name: str, value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise CheckpointError(f"{name} must be a token id or a list of them, got {value!r}; correct it there")
    return list(values)
