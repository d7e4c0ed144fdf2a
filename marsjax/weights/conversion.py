"""`convert`: any checkpoint that `load` reads → a Hugging Face directory."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from marsjax.weights.directories import check_target
from marsjax.weights.loading import open_source, read
from marsjax.weights.names import EMBEDDING
from marsjax.weights.saving import DTYPE_NAMES, save


def convert(source: str | Path, target: str | Path, *, dtype: Any = None, mask_token: bool = False) -> Path:
    """Writes the checkpoint `source` (directory, hub id, .gguf) as a Hugging Face directory `target`.

    Args:
      dtype: of the written weights; None: that of the source (float32 for the dequantised weights of a GGUF file).
      mask_token: reserve and initialise a row for `<|mask|>` where the checkpoint has none.

    Raises FileExistsError, before anything is read, for a target that `check_target` refuses.
    """
    check_target(target)
    opened = open_source(source)
    if dtype is None:
        # A table that is missing or of a strange type is reported by `read`, with everything else.
        stored = opened.tensors[EMBEDDING].dtype if EMBEDDING in opened.tensors else "F32"
        dtype = DTYPE_NAMES.get(stored if stored != "F64" else "F32", "float32")
    pretrained = read(opened, layout="list", dtype=jnp.dtype(dtype), mesh=None, with_mask_token=mask_token)
    return save(pretrained, target)
