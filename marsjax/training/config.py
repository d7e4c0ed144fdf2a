"""What a training run is: nested dataclasses, checked before work; `config_text` reads them."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from marsjax.data.mixture import check_weights
from marsjax.data.sources import DataError
from marsjax.models.config import TARGETS, AdapterConfig
from marsjax.parallel.slices import parse_slice


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, the value and what is allowed."""


class AnotherRun(ConfigError):
    """The output directory holds a run of another configuration; the message lists every difference."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ModelSection:
    source: str | None = _setting(None, "where to start: a Hugging Face directory, a hub id or a .gguf file")
    init: dict | None = field(
        default=None,
        metadata={"help": "or from scratch: fields of marsjax.models.ModelConfig (vocab_size may be left)"},
    )
    tokenizer: str | None = _setting(None, "with init: 'demo', or a directory or hub id with a tokenizer")
    init_seed: int = _setting(0, "seed of the first weights, of init and of an adapter")


@dataclass(frozen=True)
class DataSection:
    train: str | dict = field(
        default="", metadata={"help": "a source such as jsonl:PATH (docs/data.md), or a mixture {SOURCE: WEIGHT, ...}"}
    )
    length: int = _setting(512, "tokens a document; longer prompts are dropped, longer answers cut")
    packing: bool = _setting(False, "several documents a row, each at a multiple of the block size")
    row_length: int | None = _setting(None, "with packing: tokens a row; None: data.length")
    noisy_length: int | None = _setting(None, "with packing: noisy rows computed a row; None: what the data need")
    batch_size: int = _setting(32, "rows an optimiser step")
    accumulation: int = _setting(1, "microbatches a step is split into")
    epochs: int | None = _setting(None, "times through the data; None: as often as steps needs")
    seed: int = _setting(0, "seed of the shuffle")
    normalisation: Literal["token", "sequence"] = _setting("token", "loss a supervised token, or a document's mean")
    fill_last_block_with_end: bool = _setting(False, "supervised end tokens up to a full block (published code)")
    template_kwargs: dict = field(default_factory=dict, metadata={"help": "arguments of the chat template"})


@dataclass(frozen=True)
class ObjectiveSection:
    name: Literal["mars", "sft", "block_diffusion", "mtp"] = _setting(
        "mars",
        "MARS, plain next-token fine-tuning, the baseline that fills blocks in any order, or, with an adapter, "
        "multi-token prediction",
    )
    block_size: int = _setting(4, "B: tokens a block of masks predicts; mtp: k, masks behind an anchor")
    ar_weight: float = _setting(1.0, "mars: weight of the next-token loss beside the mask loss; 0 leaves it out")
    anchors: int | None = _setting(None, "mtp: anchors drawn of a sequence for each step; None: all rows with a target")
    sampler: bool = _setting(True, "mtp: a head that chooses each token with the one before it in mind")
    consistency: float = _setting(1.0, "mtp: weight of the distance to the hidden state of ordinary rows (LCM)")
    soft_targets: bool = _setting(False, "mtp: learn the model's own distribution, not the data's tokens")
    tv_weight: float = _setting(0.0, "mtp: weight of the total variation distance to the model's own distribution")
    free_running: bool = _setting(False, "mtp: the sampler sees its own choices in training, not the data's tokens")

    @property
    def has_masks(self) -> bool:
        return self.name != "sft"

    @property
    def has_blocks(self) -> bool:
        """Whether text is masked a block of `block_size` tokens at a time."""
        return self.name in ("mars", "block_diffusion")

    @property
    def alignment(self) -> int:
        """Blocks of so many tokens, to which documents and target rows are aligned."""
        return self.block_size if self.has_blocks else 1


OF_MTP = ("anchors", "sampler", "consistency", "soft_targets", "tv_weight", "free_running")  # keys of mtp alone


@dataclass(frozen=True)
class AdapterSection:
    rank: int | None = _setting(None, "train a LoRA adapter of this rank and freeze the model; None: train all weights")
    alpha: float | None = _setting(None, "the adapter's scale is alpha / rank; None: 2 · rank")
    targets: list = field(default_factory=lambda: list(TARGETS), metadata={"help": "linears of a layer that get one"})
    gated: bool = _setting(True, "it acts on masks only, so that the model's own answers stay; false: plain LoRA")
    source: str | None = _setting(None, "an adapter to train further (directory or hub id); None: a new one")

    def of(self, objective: ObjectiveSection) -> AdapterConfig | None:
        """What the model gets; None: no adapter."""
        if self.rank is None:
            return None
        masks = {"sft": 0, "mtp": objective.block_size}.get(objective.name, 1)
        return AdapterConfig(
            rank=self.rank,
            alpha=2.0 * self.rank if self.alpha is None else self.alpha,
            targets=tuple(self.targets),
            gated=self.gated,
            masks=masks,
            sampler=objective.name == "mtp" and objective.sampler,
        )


@dataclass(frozen=True)
class OptimizerSection:
    learning_rate: float = _setting(5e-6, "peak learning rate")
    steps: int | None = _setting(None, "optimiser steps; None: what data.epochs gives")
    warmup: float = _setting(0.03, "warm-up: a fraction of all steps if below 1, else a number of steps")
    final_fraction: float = _setting(0.0, "learning rate at the end of the cosine, as a fraction of the peak")
    b1: float = _setting(0.9, "Adam's decay of the mean")
    b2: float = _setting(0.999, "Adam's decay of the square")
    eps: float = _setting(1e-8, "Adam's epsilon")
    weight_decay: float = _setting(0.0, "decoupled decay of matrices; never of norms, biases and embeddings")
    moments: Literal["float32", "bfloat16", "factored"] = _setting(
        "float32", "Adam's moments; bfloat16: the mean only; factored: that, and the square by rows and columns"
    )
    clip_norm: float | None = _setting(1.0, "bound on the gradients' global norm; None: no clipping")


@dataclass(frozen=True)
class ComputeSection:
    platform: Literal["cpu", "gpu", "tpu"] | None = _setting(None, "stop unless JAX runs on this; None: take any")
    dtype: Literal["auto", "float32", "bfloat16"] = _setting("auto", "compute dtype; auto: float32 on a CPU only")
    remat: str | None = _setting(
        "auto",
        "a jax.checkpoint_policies name such as nothing_saveable; None: keep all; auto: on a CPU with scanned layers "
        "dots_with_no_batch_dims_saveable, else None",
    )
    chunk_mib: int = _setting(256, "bound on one chunk of logits of a device, MiB")
    attention: Literal["auto", "splash", "blocks", "dense"] = _setting(
        "auto", "splash: the TPU's kernel; blocks: half the work of dense; dense: any alignment; auto: splash on a TPU"
    )
    unroll_layers: bool = _setting(False, "no scan over layers: quicker steps of small models, slower compilation")
    seed: int = _setting(0, "seed of everything the objective draws")


@dataclass(frozen=True)
class ParallelSection:
    accelerator: str | None = _setting(None, "slice the run is meant for, such as v5p-32; marsjax plan compiles for it")
    slice: int = _setting(1, "slices; the batch is split over them")
    data: int = _setting(1, "ways the batch is split, weights replicated")
    fsdp: int = _setting(-1, "ways batch and weights are split; one of the four may be -1: what is left of the devices")
    tensor: int = _setting(1, "ways heads, MLP and vocabulary are split")
    coordinator: str | None = _setting(None, "several processes: host:port of process 0, or auto; also by environment")
    processes: int | None = _setting(None, "with host:port: how many there are")
    process_id: int | None = _setting(None, "with host:port: which one this is")
    start_timeout: float | None = _setting(None, "seconds to wait for all processes; None: 300")

    @property
    def sizes(self) -> dict[str, int]:
        return {"slice": self.slice, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}


@dataclass(frozen=True)
class EvaluationSection:
    data: str | None = _setting(None, "held-out source, as data.train; None: no evaluation")
    rows: int = _setting(256, "rows of it to use")
    every: int = _setting(200, "steps between evaluations; the last step is always evaluated")
    decode_prompts: int = _setting(0, "prompts of it to decode for tokens per forward; 0: none")
    tau: float = _setting(0.95, "threshold for them; mtp decodes at the model's own answers")
    max_new_tokens: int = _setting(128, "limit for them")


@dataclass(frozen=True)
class CheckpointSection:
    every: int = _setting(500, "steps between checkpoints; the last step is always saved")
    keep: int = _setting(1, "newest checkpoints to keep, beside the best")
    stop_after: int | None = _setting(None, "end the run after this step; the same command later goes on")


@dataclass(frozen=True)
class OutputSection:
    directory: str = _setting("", "where checkpoints, metrics and the export go; runs resume from what is there")
    export: Literal["last", "best", "none"] = _setting("last", "which weights are exported to DIRECTORY/export")
    export_dtype: Literal["float32", "bfloat16", "float16"] = _setting("float32", "dtype of the exported weights")
    log_every: int = _setting(10, "steps between lines of metrics")
    profile_at: int | None = _setting(None, "step at which a profiler trace of profile_steps begins; None: none")
    profile_steps: int = _setting(3, "steps of the trace, written to DIRECTORY/profile")
    tensorboard: bool = _setting(True, "write TensorBoard events beside metrics.jsonl")


@dataclass(frozen=True)
class TrainConfig:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    output: OutputSection = field(default_factory=OutputSection)

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("\n".join(problems))

    @property
    def row_length(self) -> int:
        """Tokens a row of a batch."""
        return self.data.row_length or self.data.length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


RESUME_MAY_CHANGE = ("parallel", "evaluation", "checkpoint", "output")
# What says how a step is computed, not which: another number of chips may need another choice.
HOW = ("compute.platform", "compute.remat", "compute.attention", "compute.chunk_mib", "compute.unroll_layers",
       "data.accumulation")  # fmt: skip


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Fields in which a saved run and this one differ, apart from those that do not change the training.

    A key that either does not know has its default there: versions may add keys without ending runs of earlier ones.
    """
    found = []
    sections = typing.get_type_hints(TrainConfig)
    for section in sorted((set(old) | set(new)) - set(RESUME_MAY_CHANGE)):
        defaults = dataclasses.asdict(sections[section]()) if section in sections else {}
        before, now = ({**defaults, **(tree.get(section) or {})} for tree in (old, new))
        for key in sorted(set(before) | set(now)):
            if before.get(key) != now.get(key) and f"{section}.{key}" not in HOW:
                found.append(f"{section}.{key}: {before.get(key)!r} there, {now.get(key)!r} here")
    return found


def as_yaml(value: Any) -> str:
    """A setting's value as a configuration writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _problems(c: TrainConfig) -> Iterator[str]:
    """What is wrong with the values together; types are right already."""
    at_least_one = {
        "data.length": c.data.length - 1,
        "data.batch_size": c.data.batch_size,
        "data.accumulation": c.data.accumulation,
        "objective.block_size": c.objective.block_size,
        "compute.chunk_mib": c.compute.chunk_mib,
        "evaluation.rows": c.evaluation.rows,
        "evaluation.every": c.evaluation.every,
        "evaluation.max_new_tokens": c.evaluation.max_new_tokens,
        "checkpoint.every": c.checkpoint.every,
        "checkpoint.keep": c.checkpoint.keep,
        "output.log_every": c.output.log_every,
        "output.profile_steps": c.output.profile_steps,
        "output.profile_at": 1 if c.output.profile_at is None else c.output.profile_at,
        "data.epochs": 1 if c.data.epochs is None else c.data.epochs,
        "optimizer.steps": 1 if c.optimizer.steps is None else c.optimizer.steps,
        "checkpoint.stop_after": 1 if c.checkpoint.stop_after is None else c.checkpoint.stop_after,
    }
    for name, value in at_least_one.items():
        if value < 1:
            yield f"{name} must be at least {2 if name == 'data.length' else 1}"
    for section, values in c.to_dict().items():
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{section}.{key}={value} must be a finite number"
    if (c.model.source is None) == (c.model.init is None):
        yield "give one of model.source (fine-tune a checkpoint) and model.init (train from scratch)"
    if c.model.init is not None and c.model.tokenizer is None:
        yield "model.init needs model.tokenizer: 'demo', or a directory or hub id that has one"
    if c.model.source is not None and c.model.tokenizer is not None:
        yield "model.tokenizer goes with model.init; a checkpoint brings its own"
    if not c.data.train:
        yield "data.train is missing: jsonl:PATH or problems:train"
    elif isinstance(c.data.train, dict):
        try:
            check_weights(c.data.train)
        except DataError as error:
            yield f"data.train: {error}"
    if not c.output.directory:
        yield "output.directory is missing: where checkpoints, metrics and the export go"
    if "://" in c.output.directory:
        yield f"output.directory={c.output.directory} is a URL; it must be a mounted path, such as /mnt/bucket/run"
    if c.output.export == "best" and c.evaluation.data is None:
        yield "output.export=best needs evaluation.data, whose loss says which is best; or export=last"
    if c.compute.unroll_layers and c.compute.remat not in (None, "auto"):
        yield (
            f"compute.remat={c.compute.remat} acts on the scan over layers, which compute.unroll_layers=true turns "
            "off; leave one of them out"
        )
    if c.optimizer.steps is None and c.data.epochs is None:
        yield "give optimizer.steps or data.epochs: how long to train"
    if c.data.accumulation >= 1 and c.data.batch_size % c.data.accumulation:
        yield f"data.batch_size={c.data.batch_size} is not a multiple of data.accumulation={c.data.accumulation}"
    d, b, row_length = c.data, c.objective.alignment, c.row_length
    if not d.packing:
        for name in ("row_length", "noisy_length"):
            if getattr(d, name) is not None:
                yield f"data.{name}={getattr(d, name)} goes with data.packing=true"
    elif b >= 1 and row_length % b:
        yield f"packed rows of {row_length} tokens (data.row_length) are no multiple of objective.block_size={b}"
    elif row_length < d.length:
        yield f"data.row_length={row_length} is shorter than a document of data.length={d.length} may be"
    elif d.noisy_length is not None and (d.noisy_length % b or not 0 < d.noisy_length <= row_length):
        yield f"data.noisy_length={d.noisy_length} must be a multiple of {b} (block_size) and at most {row_length}"
    if d.fill_last_block_with_end and not c.objective.has_blocks:
        yield f"data.fill_last_block_with_end=true fills blocks, which objective.name={c.objective.name} does not have"
    if list(c.parallel.sizes.values()).count(-1) > 1:
        yield f"of parallel.slice, data, fsdp and tensor only one may be -1, got {c.parallel.sizes}"
    for name, size in c.parallel.sizes.items():
        if size < 1 and size != -1:
            yield f"parallel.{name}={size} must be at least 1, or -1 for what is left of the devices"
    if c.parallel.accelerator is not None:
        try:
            parse_slice(c.parallel.accelerator)
        except ValueError as error:
            yield f"parallel.accelerator: {error}"
    if c.parallel.start_timeout is not None and not c.parallel.start_timeout > 0:
        yield f"parallel.start_timeout={c.parallel.start_timeout} must be above 0, in seconds"
    for name, seed in (
        ("data.seed", c.data.seed),
        ("model.init_seed", c.model.init_seed),
        ("compute.seed", c.compute.seed),
    ):
        if not 0 <= seed < 2**32:
            yield f"{name}={seed} is outside 0 to 2**32 - 1"
    o = c.optimizer
    if not o.learning_rate > 0:
        yield f"optimizer.learning_rate={o.learning_rate} must be above 0"
    if not o.warmup >= 0:
        yield f"optimizer.warmup={o.warmup} must be at least 0"
    if o.steps is not None and o.warmup > o.steps:
        yield f"optimizer.warmup={o.warmup:g} steps are more than optimizer.steps={o.steps}"
    for name, low, high in (("final_fraction", 0, 1), ("b1", 0, 0.999999), ("b2", 0, 0.99999999)):
        if not low <= getattr(o, name) <= high:
            yield f"optimizer.{name}={getattr(o, name)} is outside {low} to {high}"
    if not o.eps > 0:
        yield f"optimizer.eps={o.eps} must be above 0"
    if not o.weight_decay >= 0:
        yield f"optimizer.weight_decay={o.weight_decay} must be at least 0"
    if o.clip_norm is not None and not o.clip_norm > 0:
        yield f"optimizer.clip_norm={o.clip_norm} must be above 0; null turns clipping off"
    if not c.objective.ar_weight >= 0:
        yield f"objective.ar_weight={c.objective.ar_weight} must be at least 0"
    if c.objective.name == "block_diffusion" and c.objective.ar_weight != ObjectiveSection.ar_weight:
        yield f"objective.ar_weight={c.objective.ar_weight} belongs to mars; block_diffusion has one loss: leave it out"
    yield from _adapter_problems(c)
    if not 0 < c.evaluation.tau <= 1:
        yield f"evaluation.tau={c.evaluation.tau} is outside 0 < tau <= 1"
    if c.evaluation.decode_prompts < 0:
        yield f"evaluation.decode_prompts={c.evaluation.decode_prompts} must be at least 0"


def _adapter_problems(c: TrainConfig) -> Iterator[str]:
    o, a, defaults = c.objective, c.adapter, ObjectiveSection()
    try:
        a.of(o)
    except ValueError as error:
        yield str(error)
    if a.rank is None:
        if o.name == "mtp":
            yield "objective.name=mtp trains an adapter: set adapter.rank, for example 16"
        for name in ("alpha", "targets", "gated", "source"):
            if getattr(a, name) != getattr(AdapterSection(), name):
                yield f"adapter.{name}={getattr(a, name)} goes with adapter.rank: without one all weights are trained"
    elif c.model.init is not None:
        yield "adapter.rank with model.init: the random weights an adapter needs beside it would be saved nowhere"
    elif o.name == "block_diffusion" and a.gated:
        yield (
            "objective.name=block_diffusion lets text see ahead in its block, which a frozen model has never learned: "
            "set adapter.gated=false"
        )
    elif o.name == "sft" and a.gated:
        yield "objective.name=sft has no masks, which is where a gated adapter acts: set adapter.gated=false"
    elif o.name == "mars" and a.gated and o.ar_weight != defaults.ar_weight:
        yield f"objective.ar_weight={o.ar_weight}: under a gated adapter the next-token loss is constant; leave it out"
    if o.name != "mtp":
        for name in OF_MTP:
            if getattr(o, name) != getattr(defaults, name):
                own = f"{getattr(o, name)} belongs to objective.name=mtp"
                yield f"objective.{name}={own}; for {o.name} leave it at {as_yaml(getattr(defaults, name))}"
        return
    if o.block_size >= c.data.length > 1:
        yield f"objective.block_size={o.block_size} masks reach past documents of data.length={c.data.length}"
    if o.anchors is not None and o.anchors < 1:
        yield f"objective.anchors={o.anchors} must be at least 1, or null for all"
    for name in ("consistency", "tv_weight"):
        if not getattr(o, name) >= 0:
            yield f"objective.{name}={getattr(o, name)} must be at least 0"
    if o.ar_weight != defaults.ar_weight:
        yield f"objective.ar_weight={o.ar_weight} belongs to mars; leave it out"
    if o.free_running and not o.sampler:
        yield "objective.free_running=true is about the sampler, which objective.sampler=false leaves out"
    if (o.soft_targets or o.tv_weight) and not a.gated:
        yield (
            "objective.soft_targets and tv_weight learn from the frozen model, which a plain adapter changes: set "
            "adapter.gated=true"
        )
