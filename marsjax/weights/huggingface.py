"""Hugging Face directories and hub ids, opened."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marsjax.weights.safetensors_files import open_directory as open_tensors
from marsjax.weights.tensors import CheckpointError, Source

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
WITHOUT_WEIGHTS = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.*", "*.model")
DOWNLOADED = ("*.safetensors", *WITHOUT_WEIGHTS)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_directory(directory: Path, *, weights: bool = True) -> Source:
    """config.json, generation_config.json, the tokenizer if there is one, and the tensors, unread (or none)."""
    _refuse_adapter(directory)
    tensors = open_tensors(directory) if weights else {}
    if not (directory / "config.json").is_file():
        found = ", ".join(sorted(path.name for path in directory.iterdir()))
        raise CheckpointError(f"{directory} has no config.json; found: {found}")
    generation = directory / "generation_config.json"
    return Source(
        where=str(directory),
        tensors=tensors,
        tokenizer=read_tokenizer(directory),
        hf_config=read_json(directory / "config.json"),
        hf_generation=read_json(generation) if generation.is_file() else {},
    )


def _refuse_adapter(directory: Path) -> None:
    if not (directory / "adapter_config.json").is_file() or (directory / "config.json").is_file():
        return
    base = read_json(directory / "adapter_config.json").get("base_model_name_or_path") or "BASE"
    raise CheckpointError(
        f"{directory} is an adapter, not a model; load it beside the model it was trained for:"
        f" --model {base} --adapter {directory} (in Python: load({str(base)!r}, adapter={str(directory)!r}))"
    )


def find(source: str | Path, files: Sequence[str], what: str) -> Path:
    """The directory `source`, or the local copy of these files of the hub id `source`. Raises CheckpointError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if not path.exists() and isinstance(source, str) and HUB_ID.fullmatch(source):
        return download(source, files, what)
    reason = "is a file" if path.exists() else "does not exist"
    raise CheckpointError(f"{str(source)!r} {reason}; expected a directory or a hub id (owner/name){neighbours(path)}")


def download(hub_id: str, files: Sequence[str] = DOWNLOADED, what: str = "a model") -> Path:
    """The local copy of a hub repository's safetensors, configs and tokenizer, fetched where it is not cached yet.

    `files` WITHOUT_WEIGHTS leaves the safetensors out.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        # "Not found" and "no access" are HTTP errors with a response; everything else is the way there.
        response = getattr(error, "response", None)
        reason = f"the hub answers {response.status_code}" if response is not None else "the hub cannot be reached"
        others = ", or pass a .gguf file; `marsjax demo` needs no download" if what == "a model" else ""
        raise CheckpointError(
            f"{hub_id!r} is neither a local path nor {what} that can be fetched{neighbours(hub_id)}: {reason}"
            f" ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}).\n"
            "Ways out: check the spelling; log in (`hf auth login`) if its owner asks for it; on a machine without"
            f" network, fetch it elsewhere (`hf download {hub_id} --local-dir DIR`) and pass the directory{others}"
        ) from error


def neighbours(path: str | Path) -> str:
    """What there is in a path's directory, to be told with an error; "" where there is no such directory."""
    parent = Path(path).expanduser().parent
    if not parent.is_dir():
        return ""
    return f" ({parent} holds: {', '.join(sorted(p.name for p in parent.iterdir())[:20]) or 'nothing'})"


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def read_tokenizer(directory: Path) -> Any:
    """The directory's tokenizer, as its own files describe it; None if it holds none. Raises CheckpointError."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer builds a qwen2 model's tokenizer anew, with Qwen's splitting and extra tokens, whatever
    # tokenizer.json says; so where that file exists it is taken at its word.
    kind = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # what a broken file raises differs from class to class
        raise CheckpointError(f"the tokenizer in {directory} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {directory} ({type(tokenizer).__name__}) has no fast (Rust) version")
    return tokenizer
