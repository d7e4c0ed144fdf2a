"""From a configuration to the things a run works with: platform, mesh, rows, objective; the model is `base_model`'s."""

import dataclasses
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marsjax.attention.splash import MAX_LENGTH
from marsjax.data.batch import BatchFormat
from marsjax.data.packing import Packing, pack
from marsjax.data.pipeline import RowSet, TrainBatches, eval_batches, load_rows
from marsjax.data.sources import DataError, open_source
from marsjax.models import ModelConfig
from marsjax.parallel import sharding
from marsjax.parallel.slices import parse_slice
from marsjax.parallel.start import agree, barrier, is_main, texts_of_all
from marsjax.text.chat import render_prompt, same_day, turn_end_id
from marsjax.training import block_diffusion, mtp
from marsjax.training.config import OF_MTP, ConfigError, TrainConfig
from marsjax.training.evaluate import EvalStep, held_out_prompts, make_eval_step
from marsjax.training.objectives import Forward, mars, sft
from marsjax.training.step import Objective, batch_sharding, local_rows
from marsjax.weights import Pretrained


def check_platform(config: TrainConfig) -> str:
    """The platform JAX runs on. Raises RuntimeError if another one, or another slice, was asked for."""
    actual, wanted = jax.default_backend(), config.compute.platform
    if wanted is not None and wanted != actual:
        raise RuntimeError(
            f"compute.platform={wanted} was asked for, but JAX runs on {actual} ({len(jax.devices())} devices); "
            f"install jax for {wanted}, unset JAX_PLATFORMS, or set compute.platform={actual}"
        )
    if actual == "tpu" and config.parallel.accelerator is not None:
        slice_, count = parse_slice(config.parallel.accelerator), jax.device_count()
        kind, chips = jax.devices()[0].device_kind, slice_.chips * max(1, config.parallel.slice)
        if (kind, count) != (slice_.chip.kind, chips):
            raise RuntimeError(
                f"parallel.accelerator={config.parallel.accelerator} (parallel.slice={config.parallel.slice}) means "
                f"{chips} chips of {slice_.chip.kind}, but here are {count} of {kind}; name the slice that is here, or "
                "null"
            )
    return actual


def check_processes(config: TrainConfig, count: int) -> None:
    """Raises ConfigError for what a run of `count` processes cannot do, and where their configurations differ."""
    if count == 1:
        return
    if config.evaluation.data is not None and config.evaluation.decode_prompts:
        raise ConfigError(
            f"evaluation.decode_prompts={config.evaluation.decode_prompts}: prompts are decoded by one process, and "
            f"this run has {count}; set it to 0, and decode the export instead (marsjax generate)"
        )
    own = dataclasses.replace(config.parallel, process_id=None)  # the one setting in which they must differ
    mine = json.loads(json.dumps(dataclasses.replace(config, parallel=own).to_dict(), default=str))
    first = agree(mine)
    unlike = [
        f"{section}.{key}={value}, not {first[section][key]}"
        for section, values in mine.items()
        for key, value in values.items()
        if first[section][key] != value
    ]
    if told := _unlike_process_0(", ".join(unlike)):
        raise ConfigError(f"the processes of a run must be started with one configuration: {told}")


def check_shared(directory: Path) -> None:
    """Raises ConfigError unless the directory is one and the same in all processes, as checkpoints need."""
    probe = directory / agree(f".shared-{uuid.uuid4().hex}")
    if is_main():
        probe.touch()
    barrier(probe.name)
    told = _unlike_process_0("" if probe.exists() else "another directory of this name")
    if is_main():
        probe.unlink(missing_ok=True)
    if told:
        raise ConfigError(f"output.directory={directory} must be on a mount that all processes share: {told}")


def _check_same_data(batches: TrainBatches, held_out: RowSet | None) -> None:
    mine = batches.state()
    if held_out is not None:
        mine |= {"held-out rows": len(held_out), "held-out fingerprint": held_out.fingerprint}
    first = agree(mine)
    unlike = ", ".join(f"{name} {value}, not {first[name]}" for name, value in mine.items() if first[name] != value)
    if told := _unlike_process_0(unlike):
        raise DataError(f"the processes of a run must read the same data: {told}; copy the files of process 0")


def _unlike_process_0(what: str) -> str:
    """The same in all processes: who has something else than process 0, and what; "" if nobody has."""
    return "; ".join(f"process {i} has {text}" for i, text in enumerate(texts_of_all(what)) if text)


def make_mesh(config: TrainConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `parallel` asks for, over all devices (None: those that JAX shows)."""
    sizes, there = config.parallel.sizes, len(jax.devices() if devices is None else devices)
    shape = ", ".join(f"{name}={size}" for name, size in sizes.items())
    given = math.prod(size for size in sizes.values() if size != -1)
    if there % given or (-1 not in sizes.values() and given != there):
        way_out = (
            "the product must divide the devices" if -1 in sizes.values() else "one of them may be -1: what is left"
        )
        raise ConfigError(f"parallel: {shape} do not fit {there} devices; {way_out}")
    sizes = {name: there // given if size == -1 else size for name, size in sizes.items()}
    return sharding.make_mesh(devices=devices, **sizes)


def check_mesh(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> None:
    """Raises ConfigError, with the numbers, where batch or model cannot be split over the mesh."""
    tensor = mesh.shape.get("tensor", 1)
    wholes = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
    }
    problems = [f"{name}={size}" for name, size in wholes.items() if size % tensor]
    if problems:
        raise ConfigError(
            f"parallel.tensor={tensor} does not divide this model's {', '.join(problems)}; use fsdp instead"
        )
    if model.hidden_size % mesh.shape.get("fsdp", 1):
        raise ConfigError(
            f"parallel.fsdp={mesh.shape['fsdp']} does not divide this model's hidden_size={model.hidden_size}"
        )
    try:
        batch_sharding(mesh, config.data.batch_size // config.data.accumulation)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@dataclasses.dataclass
class TrainData:
    """Training batches, and what is needed to read held-out ones in the same way."""

    batches: TrainBatches
    held_out: RowSet | None
    form: BatchFormat
    end_id: int
    eval_rows: int
    decode_prompts: list[list[int]]

    def held_out_batches(self) -> Iterator[Any]:
        if self.held_out is None:
            raise ValueError("there is no held-out data")
        return eval_batches(self.held_out, self.form, self.eval_rows)


def load_data(config: TrainConfig, pretrained: Pretrained, mesh: Mesh) -> TrainData:
    """Reads the sources; raises ConfigError for rows longer than the model's positions, DataError,
    with counts, when there is nothing to train on."""
    section, tokenizer = config.data, pretrained.tokenizer
    if section.length > (limit := pretrained.model.config.max_positions):
        raise ConfigError(
            f"data.length={section.length} is beyond the model's {limit} positions; lower it to at most {limit}"
        )
    mask_id = None
    if config.objective.has_blocks:
        # Without a token of its own a mask has an embedding in the adapter, and is no id of the table.
        mask_id = pretrained.model.config.vocab_size if pretrained.mask_id is None else pretrained.mask_id
    end_id = turn_end_id(tokenizer)
    form = BatchFormat(
        batch_size=section.batch_size,
        length=config.row_length,
        block_size=config.objective.alignment,
        mask_id=mask_id,
        end_id=end_id,
        pad_id=pretrained.generation.pad_id or 0,
        normalisation=section.normalisation,
        # Block diffusion decodes whole blocks, in which all see each other: one that is shorter in training would say
        # where the answer ends.
        fill_last_block_with_end=section.fill_last_block_with_end or config.objective.name == "block_diffusion",
    )

    def rows(source: str | dict) -> RowSet:
        return load_rows(
            source,
            tokenizer,
            length=section.length,
            mask_id=pretrained.mask_id,
            end_id=end_id,
            **section.template_kwargs,
        )

    prompts = decode_prompts(config, pretrained)
    train = rows(section.train)
    if config.objective.name == "mtp":
        _check_foreseen(train, config.objective.block_size)
    packing = pack_rows(config, train, form) if section.packing else None
    accumulation, micro_rows = section.accumulation, section.batch_size // section.accumulation
    batches = TrainBatches(
        train,
        form,
        seed=section.seed,
        epochs=section.epochs,
        packing=packing,
        target_block=config.objective.alignment,
        local=local_rows(batch_sharding(mesh, micro_rows), accumulation, micro_rows)
        if jax.process_count() > 1
        else None,
    )
    held_out = rows(config.evaluation.data) if config.evaluation.data else None
    _check_same_data(batches, held_out)
    micro = dataclasses.replace(form, batch_size=section.batch_size // section.accumulation)
    return TrainData(batches, held_out, micro, end_id, config.evaluation.rows, prompts)


def _check_foreseen(rows: RowSet, masks: int) -> None:
    """Raises DataError, with counts, if no mask would have anything to predict: two supervised tokens of a row, the
    second no more than `masks` behind the first."""
    stats = rows.stats
    if not rows.counted or stats.supervised_tokens > stats.rows:  # then some row has two, as a rule next to each other
        return
    sizes = rows.sizes()
    of_row = np.repeat(np.arange(len(sizes.span_offsets) - 1), np.diff(sizes.span_offsets))
    near = (sizes.span_starts[1:] - sizes.span_ends[:-1] < masks) & (of_row[1:] == of_row[:-1])
    if not (near.any() or (sizes.span_ends - sizes.span_starts > 1).any()):
        raise DataError(
            f"{rows.name}: no mask has anything to predict, since answers are of one token ({stats}); raise "
            "data.length, or give longer answers"
        )


def pack_rows(config: TrainConfig, rows: RowSet, form: BatchFormat) -> Packing:
    """Plans which documents share a row, in an order drawn from the data's seed."""
    if not rows.counted:
        raise ConfigError(f"data.packing=true needs the number of rows: {rows.name},count=10000")
    order = np.random.default_rng(config.data.seed).permutation(len(rows))
    options = {"noisy_length": config.data.noisy_length, "filled": form.filled_block}
    try:
        return pack(rows.sizes(), length=form.length, block_size=form.block_size, order=order, **options)
    except ValueError as error:
        raise ConfigError(f"data: {error}") from None


def decode_prompts(config: TrainConfig, pretrained: Pretrained) -> list[list[int]]:
    """Token ids of the prompts to decode at evaluations, rendered as the rows are. Raises ConfigError, with numbers,
    if there is none, or if one leaves no room for evaluation.max_new_tokens."""
    section = config.evaluation
    if not section.decode_prompts or section.data is None:
        return []
    found = held_out_prompts(open_source(section.data), section.decode_prompts)
    if not found:
        raise ConfigError(
            f"evaluation.decode_prompts={section.decode_prompts}: among the first conversations of {section.data} "
            "there is no prompt before an assistant's turn; set it to 0, or give other data"
        )
    options = {**same_day(pretrained.tokenizer), **config.data.template_kwargs}
    prompts = [render_prompt(pretrained.tokenizer, p, **options) for p in found]
    longest, limit = max(len(p) for p in prompts), pretrained.model.config.max_positions
    if longest + section.max_new_tokens > limit:
        raise ConfigError(
            f"evaluation.decode_prompts: the longest prompt of {section.data} has {longest} tokens, and with "
            f"evaluation.max_new_tokens={section.max_new_tokens} is beyond the model's {limit} positions; lower "
            "evaluation.max_new_tokens, or set evaluation.decode_prompts=0"
        )
    return prompts


def total_steps(config: TrainConfig, batches: TrainBatches) -> int:
    """optimizer.steps, or what the epochs give."""
    available, asked = batches.total_batches, config.optimizer.steps
    if asked is None:
        assert available is not None  # the configuration has one of the two
        if config.optimizer.warmup > available:
            raise ConfigError(
                f"optimizer.warmup={config.optimizer.warmup:g} steps are more than the {available} that "
                f"{config.data.epochs} epochs of {batches.count} rows give; lower it (below 1 it is a fraction), "
                "or raise data.epochs"
            )
        return available
    if available is not None and asked > available:
        raise ConfigError(
            f"optimizer.steps={asked}, but {config.data.epochs} epochs of {batches.count} rows hold only "
            f"{available} batches of {config.data.batch_size}; raise data.epochs, or set data.epochs=null"
        )
    return asked


def make_forward(config: TrainConfig, platform: str) -> Forward:
    name = config.compute.dtype
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    remat, attention = config.compute.remat, config.compute.attention
    if attention == "auto":
        attention = "splash" if platform == "tpu" else "blocks"
    if attention == "splash" and config.objective.name == "mtp":
        k, anchors = config.objective.block_size, min(config.objective.anchors or config.row_length, config.row_length)
        if k * anchors > MAX_LENGTH:
            raise ConfigError(
                f"objective.block_size={k} masks behind {anchors} anchors of a row are more than the {MAX_LENGTH} rows "
                f"of splash attention; set objective.anchors to at most {MAX_LENGTH // k}"
            )
    if remat == "auto":
        # A CPU computes norms, activations and softmax again in less time than it takes to store and fetch them.
        scanned_on_cpu = platform == "cpu" and not config.compute.unroll_layers
        remat = "dots_with_no_batch_dims_saveable" if scanned_on_cpu else None
    if remat is not None and not hasattr(jax.checkpoint_policies, remat):
        known = ", ".join(n for n in dir(jax.checkpoint_policies) if not n.startswith("_"))
        raise ConfigError(f"compute.remat={remat} is not a jax.checkpoint_policies name; known: {known}")
    # Said here, not found out: `marsjax plan` compiles for a TPU where there is none.
    interpret = platform != "tpu"
    return Forward(jnp.dtype(name), remat, config.compute.chunk_mib * 2**20, attention, interpret)


def make_objective(config: TrainConfig, forward: Forward) -> Objective:
    section = config.objective
    if section.name == "sft":
        return Objective(lambda model, batch, rows: sft(model, batch, target_rows=rows, forward=forward))
    if section.name == "block_diffusion":
        size = section.block_size

        def draw(batch, key, rows):
            return batch, *block_diffusion.draw_masks(key, batch, size)

        return Objective(
            lambda model, drawn, rows: block_diffusion.loss_of_masks(
                model, *drawn, block_size=size, noisy_length=rows, forward=forward
            ),
            draw,
        )
    if section.name == "mtp":
        choices = multi_token_options(config)
        return Objective(
            lambda model, drawn, rows: mtp.multi_token(model, drawn, rows, choices, forward),
            lambda batch, key, rows: mtp.draw(batch, key, rows, choices),
        )
    options: dict[str, Any] = {"block_size": section.block_size, "ar_weight": section.ar_weight, "forward": forward}
    return Objective(lambda model, batch, rows: mars(model, batch, noisy_length=rows, **options))


def make_evaluation(config: TrainConfig, model_config: ModelConfig, forward: Forward) -> EvalStep:
    """What held-out batches are scored with; see `marsjax.training.evaluate.evaluate`."""
    section, unroll = config.objective, config.compute.unroll_layers
    if section.name == "block_diffusion":
        return block_diffusion.make_eval_step(
            model_config, block_size=section.block_size, forward=forward, unroll=unroll
        )
    if section.name == "mtp":
        return mtp.make_eval_step(model_config, options=multi_token_options(config), forward=forward, unroll=unroll)
    block_size = section.block_size if section.has_masks else None
    options: dict[str, Any] = {"ar_weight": section.ar_weight, "forward": forward, "unroll": unroll}
    return make_eval_step(model_config, block_size=block_size, **options)


def multi_token_options(config: TrainConfig) -> mtp.MultiToken:
    o = config.objective
    return mtp.MultiToken(o.block_size, **{name: getattr(o, name) for name in OF_MTP})
