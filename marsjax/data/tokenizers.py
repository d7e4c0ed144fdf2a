"""The tokenizer of a model and its mask token, without the weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.sources import DataError
from marsjax.text.mask_token import ensure_mask_token
from marsjax.weights import huggingface


@dataclass(frozen=True)
class _Rows:
    vocab_size: int


def tokenizer_and_mask(name: str) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer of a model, and the id that training reserves for the mask token (marsjax.text.mask_token).

    `name`: "demo", a directory with a tokenizer (weights are not looked at), a hub id or a .gguf file. Raises DataError
    or CheckpointError.
    """
    tokenizer, known = _read(name)
    if known is None:
        # Which id is free does not depend on the rows of the embedding table; where there is none, it grows.
        rows = _Rows(max(tokenizer.get_vocab().values()) + 1)
        known = ensure_mask_token(tokenizer, rows).mask_id
    return tokenizer, known


def _read(name: str) -> tuple[PreTrainedTokenizerFast, int | None]:
    """A tokenizer, and the mask token's id where the model's configuration names it."""
    if name == "demo":
        return demo_tokenizer(), None
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise DataError(f"{path} is a file, but not a .gguf; name the directory that holds the tokenizer")
        from marsjax.weights.gguf import open_file

        source = open_file(path)
        tokenizer, config = source.tokenizer, source.hf_config
    else:
        directory = path if path.is_dir() else huggingface.download(name, huggingface.WITHOUT_WEIGHTS)
        tokenizer = huggingface.read_tokenizer(directory)
        file = directory / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if tokenizer is None:
        raise DataError(f"{name} holds no tokenizer: none of {', '.join(huggingface.TOKENIZER_FILES)}")
    return tokenizer, (config.get("marsjax") or {}).get("mask_token_id")
