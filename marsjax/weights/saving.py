"""`save`: a directory that transformers (and `load`) reads."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from marsjax.models import ModelConfig
from marsjax.parallel.start import barrier, is_main
from marsjax.weights.names import EMBEDDING, Entry, entries
from marsjax.weights.pretrained import Pretrained
from marsjax.weights.safetensors_files import DTYPES, Outgoing, write_directory

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def save(pretrained: Pretrained, directory: str | Path, *, dtype: Any = None, max_shard_bytes: float = 5e9) -> Path:
    """Writes config.json, generation_config.json, safetensors and the tokenizer's files; returns the directory.

    Args:
      dtype: float32, bfloat16 or float16; None: as held.
      max_shard_bytes: larger models are split into shards with an index.

    Everything is written beside `directory` and renamed at the end, so a crash leaves the old export or none. Weights
    of an earlier export are removed, files that do not belong to an export stay. Memory beside the model: one tensor.
    """
    target = check_target(directory)
    held = pretrained.model.embed_table.embedding[...].dtype
    dtype = np.dtype(held if dtype is None else jnp.dtype(dtype))
    if dtype not in DTYPES:
        raise ValueError(f"cannot export as {dtype}; choose one of {', '.join(DTYPE_NAMES.values())}")
    if not max_shard_bytes > 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    config, generation = _config(pretrained, DTYPE_NAMES[DTYPES[dtype]]), pretrained.generation.to_hf()
    outgoing = _outgoing(pretrained, dtype)
    if not is_main():  # gathers its part of each tensor for the one that writes
        for tensor in outgoing:
            tensor.value()
        barrier("exported")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        work.chmod(0o777 & ~_umask())
        _write_json(work / "config.json", config)
        if generation:
            _write_json(work / "generation_config.json", generation)
        if pretrained.tokenizer is not None:
            pretrained.tokenizer.save_pretrained(work)
            _portable_tokenizer_class(work / "tokenizer_config.json")
        write_directory(work, outgoing, max_shard_bytes)
        _replace(target, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    barrier("exported")
    return target


def check_target(directory: str | Path) -> Path:
    """Where an export to `directory` goes, absolute. Raises FileExistsError where it would do harm.

    The directory as a whole is put in the old one's place. That cannot be done to a mount point, takes the ground from
    under whoever works inside, and is no way to treat a directory that holds something else.
    """
    target = Path(directory).expanduser().resolve()
    if not target.exists():
        return target
    reason = None
    if not target.is_dir():
        reason = "is a file"
    elif Path.cwd().is_relative_to(target):
        reason = "is the working directory or holds it"
    elif target.is_mount():
        reason = "is a mount point"
    elif any(target.iterdir()) and not (target / "config.json").is_file():
        reason = "holds other things than an export (files, but no config.json)"
    if reason is not None:
        raise FileExistsError(f"{target} {reason}; name a directory that is new, empty or an earlier export")
    return target


def _outgoing(pretrained: Pretrained, dtype: np.dtype) -> list[Outgoing]:
    """The tensors in the order of a checkpoint, layer by layer also where the model holds stacks."""
    num_layers = pretrained.model.config.num_layers
    tensors = [
        Outgoing(name, entry.shape, dtype, _value(entry, i))
        for entry in entries(nnx.state(pretrained.model), num_layers)
        for i, name in enumerate(entry.names)
    ]

    def layer(tensor: Outgoing) -> int:
        if tensor.name.startswith("model.layers."):
            return int(tensor.name.split(".")[2])
        return -1 if tensor.name == EMBEDDING else num_layers

    return sorted(tensors, key=layer)


def _value(entry: Entry, layer: int) -> Callable[[], np.ndarray]:
    def value() -> np.ndarray:
        array = entry.variable.get_raw_value()
        part = array[layer] if entry.stacked else array
        if not part.is_fully_addressable:
            part = multihost_utils.process_allgather(part, tiled=True)
        elif len(part.devices()) > 1:  # np.asarray of a spread array would keep its copy alive on the array
            part = jax.device_put(part, jax.devices("cpu")[0])
        out = np.asarray(part)
        return out.T if entry.transpose else out

    return value


def _config(pretrained: Pretrained, dtype_name: str) -> dict[str, Any]:
    model_config, source = pretrained.model.config, pretrained.hf_config
    hf = {**model_config.to_hf(), **source, "vocab_size": model_config.vocab_size}
    if ModelConfig.from_hf(hf) != model_config:  # not the network that was loaded any more: the source cannot win
        hf |= model_config.to_hf()
    fields = [name for name in ("dtype", "torch_dtype") if name in source] or ["dtype", "torch_dtype"]
    hf |= dict.fromkeys(fields, dtype_name)
    generation = pretrained.generation.to_hf()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if hf.get(name) is None and name in generation:
            hf[name] = generation[name]
    ends = hf.get("eos_token_id")
    if not set(ends if isinstance(ends, list) else [ends]) <= set(pretrained.generation.eos_ids):
        hf["eos_token_id"] = generation.get("eos_token_id")
    if pretrained.mask_id is not None:
        hf["marsjax"] = {**(source.get("marsjax") or {}), "mask_token_id": pretrained.mask_id}
    return hf


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _portable_tokenizer_class(path: Path) -> None:
    """transformers 5 writes class names that 4 does not know; the old name of the same class is known to both."""
    if not path.is_file():
        return
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        _write_json(path, fields)


def _replace(target: Path, work: Path) -> None:
    """Puts `work` in the place of `target`; what the old directory holds besides an export moves along."""
    if not target.exists():
        work.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(old / "was")
    work.rename(target)
    for path in (old / "was").iterdir():
        if not _is_export_file(path.name) and not (target / path.name).exists():
            path.rename(target / path.name)
    shutil.rmtree(old)


_EXPORTED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|tokenizer\.model|chat_template\.(jinja|json)"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)


def _is_export_file(name: str) -> bool:
    return _EXPORTED.fullmatch(name) is not None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
