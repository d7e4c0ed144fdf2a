"""`load`: from a path or a hub id to a `Pretrained`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from marsjax.models import ModelConfig, abstract
from marsjax.models.decoder import Layout
from marsjax.weights import huggingface
from marsjax.weights.adapters import AdapterFiles, check_finite, open_adapter, warn_of_other_weights
from marsjax.weights.adapters import check as check_adapter
from marsjax.weights.assemble import assemble, check
from marsjax.weights.names import EMBEDDING, HEAD
from marsjax.weights.pretrained import Pretrained, generation_defaults
from marsjax.weights.tensors import CheckpointError, MaskRows, Source, Tensor


def load(
    source: str | Path,
    *,
    adapter: str | Path | None = None,
    layout: Layout = "list",
    dtype: Any = jnp.float32,
    adapter_dtype: Any = None,
    mesh: Mesh | None = None,
    with_mask_token: bool = False,
    weights: bool = True,
) -> Pretrained:
    """A decoder and what belongs to it, from a Hugging Face directory, a hub id ("owner/name") or a .gguf file.

    Args:
      source: where the checkpoint is; an existing path wins over a hub id of the same spelling.
      adapter: what was trained beside it (directory or hub id), ours or PEFT's; see `weights.adapters`.
      layout: "list" for decoding, "stacked" for training (see `marsjax.models.Decoder`).
      dtype: of the weights in memory, whatever the files hold.
      adapter_dtype: of the adapter's; None: `dtype`.
      mesh: devices to spread the weights over (`marsjax.parallel.sharding`); None: all on the first device.
      with_mask_token: give a model without a mask token one (arXiv 2604.07023, section 3): the first row behind the
        known tokens, growing the table to the next multiple of 128 if it has no row left.
      weights: False: only their shapes, as `jax.ShapeDtypeStruct`; nothing is read.

    Raises CheckpointError or `marsjax.models.UnsupportedModel` with every reason at once, before weights are read; and
    CheckpointError behind that for an adapter with numbers that are not finite.
    """
    added = None if adapter is None else open_adapter(adapter)
    found = open_source(source, weights=weights) if added is None else open_beside(source, added, weights=weights)
    return read(
        found,
        adapter=added,
        layout=layout,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        mesh=mesh,
        with_mask_token=with_mask_token,
        weights=weights,
    )


def open_source(source: str | Path, *, weights: bool = True) -> Source:
    """Finds out what `source` is and reads everything but the weights, which are not even looked for if so asked."""
    path = Path(source).expanduser()
    if path.is_dir():
        return huggingface.open_directory(path, weights=weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file, but not a .gguf; pass the directory that holds the checkpoint")
        from marsjax.weights.gguf import open_file

        return open_file(path)
    if (
        isinstance(source, str)
        and huggingface.HUB_ID.fullmatch(source)
        and path.suffix not in (".gguf", ".safetensors")
    ):
        files = huggingface.DOWNLOADED if weights else huggingface.WITHOUT_WEIGHTS
        return huggingface.open_directory(huggingface.download(source, files), weights=weights)
    raise CheckpointError(
        f"{str(source)!r} does not exist; expected a directory with config.json and safetensors, a .gguf file or a hub"
        f" id such as Qwen/Qwen2.5-0.5B-Instruct{huggingface.neighbours(path)}"
    )


def open_beside(source: str | Path, adapter: AdapterFiles, *, weights: bool = True) -> Source:
    """`open_source`; a hub id whose model does not fit the adapter is refused before its weights are fetched."""
    if weights and not Path(source).expanduser().exists():
        check_adapter(adapter, ModelConfig.from_hf(read_config(source)))
    return open_source(source, weights=weights)


def read_config(source: str | Path) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, without its weights; of a hub id only the small files are fetched."""
    return open_source(source, weights=False).hf_config


def read(
    source: Source,
    *,
    layout: Layout,
    dtype: Any,
    mesh: Mesh | None,
    with_mask_token: bool,
    weights: bool = True,
    adapter: AdapterFiles | None = None,
    adapter_dtype: Any = None,
) -> Pretrained:
    """The second half of `load`: checks the tensors and reads them. `adapter_dtype`: None: `dtype`."""
    config, hf_config = ModelConfig.from_hf(source.hf_config), source.hf_config
    if adapter is not None:
        check_adapter(adapter, config)
    if weights:
        check(config, source.tensors, source.where)
    mask_id = _known_mask(source, config)
    tensors = source.tensors
    learned = adapter.mask_id if adapter is not None and adapter.config and not adapter.config.masks else None
    if mask_id is None and (with_mask_token or learned is not None):
        mask_id, config, tensors = _add_mask(source, config)
    if adapter is not None:
        if learned not in (None, mask_id):
            raise CheckpointError(
                f"the adapter in {adapter.where} was trained with mask token {learned}, but that of {source.where} is "
                f"{mask_id}; give the model it was trained beside ({adapter.base or 'its files do not name it'})"
            )
        config = dataclasses.replace(config, adapter=adapter.config)
        tensors = {**tensors, **adapter.tensors}
        if adapter.training:
            hf_config = {**hf_config, "marsjax": {**(hf_config.get("marsjax") or {}), **adapter.training}}
    generation = generation_defaults(
        source.hf_generation, source.hf_config, source.tokenizer, config.vocab_size, mask_id
    )
    if adapter is not None and adapter.end_id is not None and adapter.config and not adapter.config.gated:
        generation = generation.with_end(adapter.end_id)  # a gated one ends where its base does
    if weights:
        model = assemble(config, tensors, layout=layout, dtype=dtype, mesh=mesh, adapter_dtype=adapter_dtype)
        if adapter is not None:
            check_finite(adapter, model)
            warn_of_other_weights(adapter, model)
    else:
        model = nnx.merge(*abstract(config, layout, dtype))
    return Pretrained(model, source.tokenizer, generation, mask_id, hf_config)


def _known_mask(source: Source, config: ModelConfig) -> int | None:
    from marsjax.text.mask_token import find_mask_id

    mask_id = (source.hf_config.get("marsjax") or {}).get("mask_token_id")
    if mask_id is None and source.tokenizer is not None:
        mask_id = find_mask_id(source.tokenizer)
    if mask_id is not None and not (isinstance(mask_id, int) and 0 <= mask_id < config.vocab_size):
        raise CheckpointError(
            f"{source.where}: the mask token has id {mask_id!r}, but the embedding has {config.vocab_size} rows;"
            ' correct "marsjax": {"mask_token_id": …} in config.json'
        )
    return mask_id


def _add_mask(source: Source, config: ModelConfig) -> tuple[int, ModelConfig, Mapping[str, Tensor]]:
    from marsjax.text.mask_token import ensure_mask_token

    if source.tokenizer is None:
        raise CheckpointError(
            f"{source.where} has no tokenizer, so nobody knows which rows are free for a mask token; add its"
            ' files, or name the row in config.json: "marsjax": {"mask_token_id": …}'
        )
    plan = ensure_mask_token(source.tokenizer, config)
    tables = {name: MaskRows(source.tensors[name], plan.mask_id, plan.new_vocab_size)
              for name in (EMBEDDING, HEAD) if name in source.tensors}  # fmt: skip
    config = dataclasses.replace(config, vocab_size=plan.new_vocab_size)
    return plan.mask_id, config, {**source.tensors, **tables}
