"""`save`: a directory that transformers (and `load`) reads."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from marsjax.models import ModelConfig
from marsjax.models.adapters import cannot_merge
from marsjax.weights.directories import check_target, publish, write_json
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

    Raises ValueError for a model with an adapter, which no such directory can hold.
    """
    if (adapter := pretrained.model.config.adapter) is not None:
        way_out = cannot_merge(adapter) or (
            "merge it first (marsjax.models.adapters.merge; marsjax convert BASE OUT --adapter DIR)"
        )
        raise ValueError(
            f"this model has an adapter, which an export has no place for: {way_out}; marsjax.weights.save_adapter "
            "writes the adapter alone"
        )
    target = check_target(directory)
    held = pretrained.model.embed_table.embedding[...].dtype
    dtype = storage_dtype(dtype, held)
    if not max_shard_bytes > 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    config, generation = _config(pretrained, DTYPE_NAMES[DTYPES[dtype]]), pretrained.generation.to_hf()
    tensors = outgoing(entries(nnx.state(pretrained.model), pretrained.model.config.num_layers), dtype)

    def write(work: Path) -> None:
        write_json(work / "config.json", config)
        if generation:
            write_json(work / "generation_config.json", generation)
        if pretrained.tokenizer is not None:
            pretrained.tokenizer.save_pretrained(work)
            _portable_tokenizer_class(work / "tokenizer_config.json")
        write_directory(work, tensors, max_shard_bytes)

    return publish(target, tensors, write, _EXPORTED)


def storage_dtype(dtype: Any, held: Any) -> np.dtype:
    """What to write weights as; None: as held."""
    dtype = np.dtype(held if dtype is None else jnp.dtype(dtype))
    if dtype not in DTYPES:
        raise ValueError(f"cannot export as {dtype}; choose one of {', '.join(DTYPE_NAMES.values())}")
    return dtype


def outgoing(params: Iterable[Entry], dtype: np.dtype) -> list[Outgoing]:
    """Their tensors in the order of a checkpoint, layer by layer also where the model holds stacks."""
    tensors = [
        Outgoing(name, entry.shape, dtype, _value(entry, i)) for entry in params for i, name in enumerate(entry.names)
    ]

    def layer(tensor: Outgoing) -> float:
        if ".layers." in tensor.name:
            return int(tensor.name.split(".layers.")[1].split(".")[0])
        return -1 if tensor.name == EMBEDDING else math.inf

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


def _portable_tokenizer_class(path: Path) -> None:
    """transformers 5 writes class names that 4 does not know; the old name of the same class is known to both."""
    if not path.is_file():
        return
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(path, fields)


_EXPORTED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|tokenizer\.model|chat_template\.(jinja|json)"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
