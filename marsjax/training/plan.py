"""`marsjax plan`: what a step of a configuration takes on a TPU slice, by its compiler, before a chip is paid for."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from marsjax.attention import splash
from marsjax.data.batch import Batch
from marsjax.decoding.ahead import trace_step
from marsjax.decoding.options import Options
from marsjax.models import ModelConfig
from marsjax.models.known import KNOWN
from marsjax.parallel import ahead, flops, hlo, sharding
from marsjax.parallel.slices import Slice, parse_slice
from marsjax.training import setup
from marsjax.training.base_model import check_adapter
from marsjax.training.config import ConfigError, TrainConfig
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import Params, TrainState, abstract_frozen, abstract_state
from marsjax.training.step import batch_sharding, make_train_step

_STEPS = 1000  # of the schedule, which the program does not depend on


@dataclass(frozen=True)
class Plan:
    """Figures of one optimiser step; bytes and seconds are a chip's, FLOPs those of all chips.

    `memory`: bytes by kind, `needed` their sum. `flops` are the program's, with what it computes twice;
    `model_flops` without. `seconds` by limit: of compute, HBM and (of one slice) network, each alone; a step takes at
    least the longest. `program` is the compiled text, None where it does not fit.
    """

    slice: Slice
    slices: int
    mesh: dict[str, int]
    work: dict[str, Any]  # what a step is fed
    tokens: float  # of text that a step reads, or, decoding, gives at least
    parameters: int
    memory: dict[str, float]
    needed: float
    flops: float
    model_flops: float
    hbm_bytes: float
    collectives: list[hlo.Collective]
    seconds: dict[str, float]
    compile_seconds: float
    program: str | None = dataclasses.field(default=None, repr=False)

    @property
    def chips(self) -> int:
        return self.slice.chips * self.slices

    @property
    def margin(self) -> float:
        """Bytes of a chip's HBM that are left; below 0 it does not fit."""
        return self.slice.chip.hbm - self.needed

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @property
    def step_seconds(self) -> float:
        """No step is shorter: its longest limit, the others hidden behind it."""
        return max(self.seconds.values(), default=math.nan)

    @property
    def utilisation(self) -> float:
        """Model FLOPs over what the chips could do in `step_seconds`: no run reaches more."""
        return self.model_flops / (self.chips * self.slice.chip.flops * self.step_seconds)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, without the program."""
        plan = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("program", "slice")}
        plan |= {"slice": self.slice.name, "topology": self.slice.topology, "chips": self.chips}
        plan["collectives"] = [dataclasses.asdict(c) for c in self.collectives]
        hbm = {"hbm": self.slice.chip.hbm, "margin": self.margin, "fits": self.fits}
        bounds = {"step_seconds": self.step_seconds, "utilisation": self.utilisation} if self.seconds else {}
        return _finite({**plan, **hbm, **bounds})


def _finite(value: Any) -> Any:
    """JSON has no numbers that are none: None stands for them."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan(config: TrainConfig, slice_: Slice | None = None) -> Plan:
    """Compiles the train step for the slice (None: the one the configuration names, times `parallel.slice`).

    Raises ConfigError where batch or model cannot be split over it, ahead.NoCompiler without the TPU's compiler.
    """
    slice_ = slice_ or named_slice(config)
    model, slices = model_config(config), max(1, config.parallel.slice)
    mesh = setup.make_mesh(config, ahead.devices(slice_, slices))
    setup.check_mesh(config, model, mesh)
    noisy = noisy_length(config)
    traced, state, frozen = _trace(config, model, mesh, noisy)
    data = config.data
    fixed: dict[str, Any] = {
        "slice": slice_,
        "slices": slices,
        "mesh": dict(mesh.shape),
        "work": {
            "batch_size": data.batch_size,
            "accumulation": data.accumulation,
            "row_length": config.row_length,
            "noisy_length": noisy,
        },
        "tokens": data.batch_size * config.row_length,
        "parameters": _count(state.params) + _count(frozen),
        "flops": flops.count(traced.jaxpr, _kernel_flops(config, model, noisy)),
        "model_flops": model_flops(config, model, mesh, noisy),
    }
    with jax.set_mesh(mesh):
        lowered = traced.lower(lowering_platforms=("tpu",))
    return _compile(lowered, state_bytes(state, frozen), fixed)


def plan_decode(
    config: TrainConfig, slice_: Slice | None = None, *, options: Options, lanes: int = 32, length: int = 1024
) -> Plan:
    """Compiles a decode step of the configuration's model in bfloat16: heads split over as many chips as divide them,
    lanes over the rest. `length`: positions of the cache a lane."""
    slice_ = slice_ or named_slice(config)
    model = model_config(config)
    tensor = math.gcd(model.num_kv_heads, slice_.chips)
    data = slice_.chips // tensor
    if lanes % data:
        raise ConfigError(
            f"{lanes} lanes cannot be spread over {data} groups of {tensor} chips; take a multiple of {data}"
        )
    mesh = sharding.make_mesh(devices=ahead.devices(slice_), data=data, tensor=tensor)
    traced, params, state, slots = trace_step(model, options, lanes, length, mesh)
    work = flops.count(traced.jaxpr)
    fixed: dict[str, Any] = {
        "slice": slice_,
        "slices": 1,
        "mesh": dict(mesh.shape),
        "work": {"strategy": slots.name, "slots": slots.size, "lanes": lanes, "cache_length": length},
        "tokens": lanes,
        "parameters": _count(params),
        "flops": work,
        "model_flops": work,
    }
    held = {"parameters": _bytes(params), "cache": _bytes(state)}
    return _compile(traced.lower(lowering_platforms=("tpu",)), held, fixed)


def _compile(lowered: Any, held: dict[str, float], fixed: dict[str, Any]) -> Plan:
    """`held`: bytes of a chip that are there before the step, by kind."""
    try:
        compiled, seconds = ahead.compile_(lowered)
    except jax.errors.JaxRuntimeError as error:
        if (needed := ahead.out_of_memory(error)) is None:
            raise
        memory = {**held, "everything else": max(0.0, needed - sum(held.values()))}
        nothing: dict[str, Any] = {"hbm_bytes": math.nan, "collectives": [], "seconds": {}, "compile_seconds": math.nan}
        return Plan(memory=memory, needed=needed, **nothing, **fixed)
    text = ahead.text(compiled)
    program = hlo.parse(text)
    sizes: Any = compiled.memory_analysis()
    memory = {
        **held,
        "inputs": sizes.argument_size_in_bytes - sum(held.values()),
        "temporaries": sizes.temp_size_in_bytes,
        "outputs": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
    }
    collectives, chip = program.collectives(), fixed["slice"].chip
    hbm_bytes = program.hbm_bytes()
    limits = {
        "compute": fixed["flops"] / (math.prod(fixed["mesh"].values()) * chip.flops),
        "HBM": hbm_bytes / chip.bandwidth,
    }
    if fixed["slices"] == 1:  # what crosses to another slice takes a network that no table here knows
        limits["network"] = sum(c.wire for c in collectives) / chip.links
    return Plan(
        memory=memory,
        needed=sum(memory.values()),
        hbm_bytes=hbm_bytes,
        collectives=collectives,
        seconds=limits,
        compile_seconds=seconds,
        program=text,
        **fixed,
    )


def named_slice(config: TrainConfig) -> Slice:
    """Of `parallel.accelerator`. Raises ConfigError where there is none."""
    if config.parallel.accelerator is None:
        raise ConfigError("which slice? set parallel.accelerator=v5p-32, or give --topology v5p-32 or v5p:2x2x4")
    return parse_slice(config.parallel.accelerator)


def search(config: TrainConfig, slice_: Slice | None = None, *, most: int = 8) -> Iterator[Plan]:
    """Plans of the configuration's global batch over meshes and microbatches, at most `most` compiled, as they get
    ready. Of a mesh that does not fit, the next one tried has microbatches so small that it should."""
    slice_ = slice_ or named_slice(config)
    model, tried = model_config(config), 0
    for tensor in (1, 2, 4, 8):
        if model.num_kv_heads % tensor or model.intermediate_size % tensor or slice_.chips % tensor:
            continue
        fsdp = slice_.chips // tensor
        shares = fsdp * max(1, config.parallel.slice)
        if model.hidden_size % fsdp or config.data.batch_size % shares:
            continue
        counts = [
            a for a in range(1, config.data.batch_size // shares + 1) if config.data.batch_size // shares % a == 0
        ]
        counts = [a for a in counts if a >= config.data.accumulation] or counts[-1:]
        while counts and tried < most:
            tried += 1
            accumulation = counts[0]
            data = dataclasses.replace(config.data, accumulation=accumulation)
            parallel = dataclasses.replace(config.parallel, data=1, fsdp=fsdp, tensor=tensor)
            found = plan(dataclasses.replace(config, data=data, parallel=parallel), slice_)
            yield found
            if found.fits:
                break
            held = sum(found.memory[kind] for kind in ("parameters", "moments"))
            room = max(slice_.chip.hbm - held, 1.0)
            wanted = accumulation * max(1.01, (found.needed - held) / room)
            counts = next((counts[i:] for i, a in enumerate(counts) if a >= wanted), counts[-1:])
            if counts[0] == accumulation:
                break


def best(plans: list[Plan]) -> Plan | None:
    """The quickest of those that fit; among equals the one with the most room."""
    return min((p for p in plans if p.fits), key=lambda p: (round(p.step_seconds, 3), -p.margin), default=None)


def model_config(config: TrainConfig) -> ModelConfig:
    """The network of a configuration with its adapter, without reading weights; of a published model, without a network
    either. What is wrong with an adapter to train further is said here too."""
    model = dataclasses.replace(_base_config(config), adapter=config.adapter.of(config.objective))
    check_adapter(config, model)
    return model


def _base_config(config: TrainConfig) -> ModelConfig:
    source = config.model.source
    if source is None:
        try:
            return ModelConfig(**(config.model.init or {}))
        except TypeError as error:
            raise ConfigError(f"model.init: {error} (marsjax plan needs vocab_size)") from error
    if not Path(source).expanduser().exists() and source in KNOWN:
        return KNOWN[source]
    from marsjax.weights import loading

    return ModelConfig.from_hf(loading.read_config(source))


def noisy_length(config: TrainConfig) -> int:
    """Noisy rows a row (or, for plain fine-tuning, rows that reach the head): what the data need, or at most all."""
    return config.data.noisy_length or config.row_length


def model_flops(config: TrainConfig, model: ModelConfig, mesh: Mesh, noisy: int) -> float:
    """FLOPs of a step without what it computes twice to save memory; `noisy`: as `noisy_length`."""
    kept = dataclasses.replace(config, compute=dataclasses.replace(config.compute, remat=None))
    return flops.count(_trace(kept, model, mesh, noisy)[0].jaxpr, _kernel_flops(config, model, noisy))


def state_bytes(state: TrainState, frozen: Params = {}) -> dict[str, float]:  # noqa: B006
    """Bytes a chip of weights and of moments, from where they lie."""
    return {"parameters": _bytes(state.params) + _bytes(frozen), "moments": _bytes(state.opt_state)}


def _bytes(tree: Any) -> float:
    """Of a chip."""
    leaves = jax.tree.leaves(tree)
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in leaves))


def _count(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _trace(config: TrainConfig, model: ModelConfig, mesh: Mesh, noisy: int) -> tuple[Any, TrainState, Params]:
    """(the traced step, its state, what is frozen) with shapes in place of arrays."""
    schedule = make_schedule(config.optimizer, config.optimizer.steps or _STEPS)
    optimizer = make_optimizer(config.optimizer, schedule)
    forward = setup.make_forward(config, "tpu")
    objective = setup.make_objective(config, forward)
    step: Any = make_train_step(model, objective, optimizer, schedule, mesh=mesh, unroll=config.compute.unroll_layers)
    rows, length = config.data.batch_size // config.data.accumulation, config.row_length
    place = batch_sharding(mesh, rows)

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((config.data.accumulation, rows, *shape), dtype, sharding=place)

    dtypes = {"weights": jnp.float32, "denominator": jnp.float32}
    shapes = {"denominator": ()}
    batch = Batch(*(array(dtypes.get(f, jnp.int32), *shapes.get(f, (length,))) for f in Batch._fields))
    state, frozen = abstract_state(model, optimizer, mesh), abstract_frozen(model, forward.dtype, mesh)
    with jax.set_mesh(mesh):
        return step.trace(state, batch, noisy, frozen), state, frozen


class _Visited(NamedTuple):
    """Pairs that a kernel's calls visit, and rows of keys by which to tell calls apart."""

    keys: int
    forward: float
    of_q: float
    of_kv: float

    @classmethod
    def of(
        cls, head_dim: int, length: int, noisy: int = 0, block: int = 1,
        *, behind: bool = False, constant: bool = False, **kind: bool,
    ):  # fmt: skip
        """As `splash.two_stream_attend` or `splash.behind_attend`."""
        tiles = splash.choose_tiles(length, noisy, block, head_dim, behind=behind, **kind)
        layout = splash.Layout(length, noisy, block, tiles.unit, **kind)

        def area(q: int, kv: int, first_key: int = 0) -> float:
            grid = splash.visits(layout, q, kv)[layout.start // q if behind else 0 :, first_key // kv :]
            return float((grid > 0).sum()) * q * kv

        first_key = layout.start if constant else 0
        return cls(layout.total, area(tiles.q, tiles.kv), area(*tiles.backward), area(*tiles.backward, first_key))


def _kernel_flops(config: TrainConfig, model: ModelConfig, noisy: int) -> flops.Kernel:
    """Of splash attention's kernels: two products a visited pair forward, five backward, in one kernel or two."""
    o, length = config.objective, config.row_length
    if o.name == "mtp":
        masks, gated = o.block_size * min(noisy, o.anchors or noisy), config.adapter.gated
        behind = _Visited.of(model.head_dim, length, masks, o.block_size, anchored=True, behind=True, constant=gated)
        visited = [_Visited.of(model.head_dim, length), behind]
    elif o.has_masks:
        visited = [_Visited.of(model.head_dim, length, noisy, o.block_size, ahead=o.name == "block_diffusion")]
    else:
        visited = [_Visited.of(model.head_dim, length)]

    def count(equation: Any) -> float:
        name = str(equation.params.get("name_and_src_info", equation.params.get("name", "")))
        shapes = [v.aval.shape for v in equation.invars if len(v.aval.shape) >= 3]
        heads = max(math.prod(shape[:-2]) for shape in shapes)
        keys = max(shape[-2] for shape in shapes)  # a call has at least as many as queries, and tells by them only
        pairs = next((v for v in visited if v.keys == keys), visited[-1])
        # dq takes three of the five products, dkv four: each computes the scores and their gradient anew.
        work = 4 * pairs.of_kv if "dkv" in name else 3 * pairs.of_q if "dq" in name else 2 * pairs.forward
        return 2.0 * heads * work * model.head_dim

    return count
