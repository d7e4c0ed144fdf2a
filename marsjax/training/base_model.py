"""The model that a run trains, or an adapter beside it: from files, or new."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from marsjax.models import Decoder, ModelConfig, abstract
from marsjax.models.adapters import attach
from marsjax.models.layout import from_params
from marsjax.parallel import sharding
from marsjax.text.chat import turn_end_id
from marsjax.text.mask_token import ensure_mask_token
from marsjax.training.config import ConfigError, ModelSection, TrainConfig
from marsjax.weights import GenerationDefaults, Pretrained, adapters, huggingface, load


def load_model(config: TrainConfig, mesh: Mesh, dtype: Any = jnp.float32) -> Pretrained:
    """The model to train, layers stacked, in float32, on the mesh; with a mask token if the objective needs one. Under
    an adapter, which is float32, the frozen weights have `dtype`."""
    adapter, with_mask = config.adapter.of(config.objective), _needs_mask_token(config)
    if config.model.source is not None:
        found = load(
            config.model.source,
            adapter=config.adapter.source,
            layout="stacked",
            dtype=jnp.float32 if adapter is None else dtype,
            adapter_dtype=jnp.float32,
            mesh=mesh,
            with_mask_token=with_mask,
        )
    else:
        found = new_model(config.model, mesh, with_mask_token=with_mask)
    if adapter is None or config.adapter.source is not None:
        return found
    return dataclasses.replace(found, model=attach(found.model, adapter, seed=config.model.init_seed, mesh=mesh))


def describe_model(config: TrainConfig) -> Pretrained:
    """As `load_model`, with shapes in place of weights."""
    with_mask = _needs_mask_token(config)
    if config.model.source is not None:
        found = load(config.model.source, layout="stacked", with_mask_token=with_mask, weights=False)
    else:
        found = new_model(config.model, None, with_mask_token=with_mask)
    adapter = config.adapter.of(config.objective)
    if adapter is None:
        return found
    described = dataclasses.replace(found.model.config, adapter=adapter)
    return dataclasses.replace(found, model=nnx.merge(*abstract(described)))


def check_adapter(config: TrainConfig, model: ModelConfig) -> None:
    """Raises ConfigError if the adapter to train further is not the one that the configuration describes, and
    CheckpointError if it does not fit the model."""
    if config.adapter.source is None:
        return
    found = adapters.open_adapter(config.adapter.source)
    adapters.check(found, model)
    there, here = (
        {**dataclasses.asdict(a), "targets": sorted(a.targets)} for a in (found.config, model.adapter) if a is not None
    )
    if unlike := [f"{name} {there[name]!r} there, {here[name]!r} here" for name in here if there[name] != here[name]]:
        raise ConfigError(
            f"adapter.source={config.adapter.source} is another adapter than this run trains: {'; '.join(unlike)}; set "
            "adapter.rank, alpha, targets and gated to what is there. masks and sampler follow from objective: mtp has "
            "block_size masks, the others one, sft none"
        )


def _needs_mask_token(config: TrainConfig) -> bool:
    """An adapter brings an embedding of masks with it, and leaves the model's table as it is."""
    return config.objective.has_masks and config.adapter.rank is None


def new_model(section: ModelSection, mesh: Mesh | None, *, with_mask_token: bool) -> Pretrained:
    """Random weights for `section.init` (no mesh: their shapes). vocab_size defaults to the tokenizer's, with room for
    a mask token."""
    tokenizer = _tokenizer(str(section.tokenizer))
    known = max(tokenizer.get_vocab().values()) + 1
    fields = {"vocab_size": -(-(known + 1) // 64) * 64, **(section.init or {})}
    names = {f.name for f in dataclasses.fields(ModelConfig)} - {"adapter"}
    if unknown := sorted(set(fields) - names):
        raise ConfigError(f"model.init: unknown {', '.join(unknown)}; known are {', '.join(sorted(names))}")
    try:
        model_config = ModelConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.init: {error}") from error
    mask_id = None
    if with_mask_token:
        plan = ensure_mask_token(tokenizer, model_config)
        model_config = dataclasses.replace(model_config, vocab_size=plan.new_vocab_size)
        mask_id = plan.mask_id
    elif known > model_config.vocab_size:
        raise ConfigError(f"model.init: vocab_size={model_config.vocab_size}, but the tokenizer knows {known} tokens")
    graphdef, weights = abstract(model_config)

    def begin():
        return nnx.to_pure_dict(nnx.state(Decoder(model_config, rngs=nnx.Rngs(section.init_seed))))

    if mesh is None:
        model = nnx.merge(graphdef, weights)
    else:
        places = nnx.to_pure_dict(sharding.shardings(weights, mesh))
        model = from_params(model_config, jax.jit(begin, out_shardings=places)())
    generation = GenerationDefaults((turn_end_id(tokenizer),), tokenizer.pad_token_id, tokenizer.bos_token_id)
    return Pretrained(model, tokenizer, generation, mask_id)


def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name == "demo":
        from marsjax.data.demo_tokenizer import demo_tokenizer

        return demo_tokenizer()
    path = Path(name).expanduser()
    directory = path if path.is_dir() else huggingface.download(name, huggingface.WITHOUT_WEIGHTS)
    tokenizer = huggingface.read_tokenizer(directory)
    if tokenizer is None:
        raise ConfigError(f"model.tokenizer={name} holds none of {', '.join(huggingface.TOKENIZER_FILES)}")
    return cast(PreTrainedTokenizerFast, tokenizer)
