"""`marsjax export`: any checkpoint of a run as a Hugging Face directory, on one machine, whatever trained it."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from marsjax.models.adapters import join
from marsjax.models.layout import from_params
from marsjax.parallel.sharding import make_mesh
from marsjax.text.chat import turn_end_id
from marsjax.training import base_model
from marsjax.training.checkpoints import Checkpoints
from marsjax.training.config import ConfigError, TrainConfig
from marsjax.training.config_text import load_config
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import abstract_state, parted
from marsjax.weights import Pretrained, save
from marsjax.weights.adapters import save_adapter


def export(
    run: str | Path, target: str | Path | None = None, *, step: int | None = None, dtype: Any = None
) -> tuple[Path, int]:
    """(the directory written, the step). Reads the parameters of a checkpoint, and of the run's model all but weights.

    Args:
      run: `output.directory` of a run.
      target: None: RUN/export for the newest step, else RUN/export-STEP.
      step: None: the newest readable one.
      dtype: None: the run's `output.export_dtype`.

    Raises ConfigError where `run` holds no run, RuntimeError where no checkpoint, or not that one, can be read.
    """
    directory = Path(run).expanduser()
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"{directory} holds no run: there is no config.yaml in it")
    config = load_config(directory / "config.yaml")
    checkpoints = Checkpoints(directory / "checkpoints")
    if not checkpoints.steps():
        raise ConfigError(f"{checkpoints.directory} holds no checkpoint yet")
    mesh = make_mesh(devices=jax.devices()[:1], fsdp=1)
    described = base_model.describe_model(config)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 1))
    like = abstract_state(described.model.config, optimizer, mesh)
    found = checkpoints.restore_params(like, step)
    # Beside an adapter, shapes stand for the frozen weights, which are not written.
    frozen = parted(described.model.config, nnx.to_pure_dict(nnx.state(described.model)))[1]
    model = from_params(described.model.config, join(frozen, found.params))
    path = Path(target or directory / ("export" if step is None else f"export-{found.step}"))
    out = as_pretrained(config, described, model, turn_end_id(described.tokenizer))
    return write(config, out, path, dtype, norms=found.host.get("base")), found.step


def write(config: TrainConfig, out: Pretrained, path: Path, dtype: Any = None, *, norms: str | None) -> Path:
    """The trained weights as a directory: the whole model, or its adapter alone. `norms`: its base's fingerprint."""
    dtype = dtype or config.output.export_dtype
    if out.model.config.adapter is None:
        return save(out, path, dtype=dtype)
    return save_adapter(
        out.model,
        path,
        base=config.model.source,
        mask_id=out.mask_id,
        end_id=out.generation.eos_ids[0],
        norms=norms,
        trained=out.hf_config.get("marsjax") or {},
        dtype=dtype,
    )


def as_pretrained(config: TrainConfig, source: Pretrained, model: Any, end_id: int) -> Pretrained:
    """A trained model with what belongs to it: the source's tokenizer and fields, and how to decode it."""
    hf_config, objective = source.hf_config, config.objective
    if objective.has_masks:  # how to decode: "auto" asks, and other block sizes warn
        trained = {"block_size": objective.block_size, "objective": objective.name}
        hf_config = {**hf_config, "marsjax": {**(hf_config.get("marsjax") or {}), **trained}}
    return Pretrained(model, source.tokenizer, source.generation.with_end(end_id), source.mask_id, hf_config)
