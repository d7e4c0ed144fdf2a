"""`convert`: any checkpoint that `load` reads → a Hugging Face directory."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from marsjax.models.adapters import cannot_merge, merge
from marsjax.weights.adapters import open_adapter
from marsjax.weights.directories import check_target
from marsjax.weights.loading import open_beside, open_source, read
from marsjax.weights.names import EMBEDDING
from marsjax.weights.saving import DTYPE_NAMES, save


def convert(
    source: str | Path,
    target: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: Any = None,
    mask_token: bool = False,
) -> Path:
    """Writes the checkpoint `source` (directory, hub id, .gguf) as a Hugging Face directory `target`.

    Args:
      adapter: directory or hub id of an adapter to merge into the weights.
      dtype: of the written weights; None: that of the source (float32 for the dequantised weights of a GGUF file).
      mask_token: reserve and initialise a row for `<|mask|>` where the checkpoint has none; for an adapter with an
        embedding for masks that is done anyway.

    Raises FileExistsError, before anything is read, for a target that `check_target` refuses; ValueError, with the
    reason, before any weights are read for an adapter that cannot be merged.
    """
    check_target(target)
    added = None if adapter is None else open_adapter(adapter)
    if added is not None and added.config is not None:
        if reason := cannot_merge(added.config):
            raise ValueError(f"the adapter in {added.where} cannot be merged into the model's weights: {reason}")
        mask_token |= added.config.masks > 0
    opened = open_source(source) if added is None else open_beside(source, added)
    if dtype is None:
        # A table that is missing or of a strange type is reported by `read`, with everything else.
        stored = opened.tensors[EMBEDDING].dtype if EMBEDDING in opened.tensors else "F32"
        dtype = DTYPE_NAMES.get(stored if stored != "F64" else "F32", "float32")
    pretrained = read(
        opened,
        layout="list",
        dtype=jnp.dtype(dtype),
        mesh=None,
        with_mask_token=mask_token,
        adapter=added,
        adapter_dtype=jnp.float32,  # rounded once, with the weights
    )
    merged = merge(pretrained.model, pretrained.mask_id)
    return save(dataclasses.replace(pretrained, model=merged), target)
