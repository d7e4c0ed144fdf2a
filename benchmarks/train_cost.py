"""What a MARS step costs beside an AR fine-tuning step on the same rows, and what the input costs beside a step.

    python benchmarks/train_cost.py --data gsm8k_train.jsonl            # FLOPs, of SmolLM2 and of Qwen2.5 shapes
    python benchmarks/train_cost.py --data gsm8k_train.jsonl --seconds  # and seconds on this machine, and the input

Both steps see the same batches, one document a row or packed, and both have the head on rows with a target only. FLOPs
are those of the traced step (`marsjax.parallel.flops`), nothing computed twice, mean of `--batches` batches. Seconds
are those of a step of few rows, medians of steps that take turns. "supervised": rows with a target, of all positions;
"noisy": noisy rows computed, of all positions, rounded up to eighths of a row. "input": making a batch and placing it
on the device, in turn with the steps; in training a thread makes batches ahead.
"""

import argparse
import resource
import statistics
import time
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from decode_speed import default_model

from marsjax.data.batch import Batch, BatchFormat
from marsjax.data.packing import pack
from marsjax.data.pipeline import TrainBatches, load_rows, needed_target_rows
from marsjax.models import ModelConfig
from marsjax.models.known import KNOWN
from marsjax.parallel import flops
from marsjax.parallel.sharding import make_mesh
from marsjax.text.chat import turn_end_id
from marsjax.training import load_config, setup
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import abstract_state, new_state
from marsjax.training.step import batch_sharding, make_train_step, place_batch
from marsjax.weights import load

MESH = make_mesh(fsdp=1)
SHAPES = ((512, False), (1024, True), (2048, True))  # tokens a row, packed


def make_step(model: ModelConfig, objective: str, block_size: int, remat: str):
    """(step, optimizer)."""
    config = load_config(None, [
        "model.source=unused", "data.train=jsonl:unused.jsonl", "output.directory=unused", "optimizer.steps=1",
        f"objective.name={objective}", f"objective.block_size={block_size}", f"compute.remat={remat}",
    ])  # fmt: skip
    schedule = make_schedule(config.optimizer, 1)
    optimizer = make_optimizer(config.optimizer, schedule)
    made = setup.make_objective(config, setup.make_forward(config, "cpu"))
    return make_train_step(model, made, optimizer, schedule, mesh=MESH), optimizer


@cache
def step_flops(model: ModelConfig, objective: str, block_size: int, rows: int, length: int, target_rows: int) -> float:
    step, optimizer = make_step(model, objective, block_size, "null")
    like = jax.ShapeDtypeStruct((1, rows, length), jnp.int32)
    floats = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    batch = Batch(like, like, like, like, like, floats, like, jax.ShapeDtypeStruct((1, rows), jnp.float32))
    with jax.set_mesh(MESH):
        return flops.count(step.trace(abstract_state(model, optimizer, MESH), batch, target_rows).jaxpr)


def batches(data, block_size: int, rows: int, length: int, packed: bool, prefetch: int = 0) -> TrainBatches:
    form = BatchFormat(rows, length, block_size, data.mask_id, data.end_id)
    packing = None
    if packed:
        order = np.random.default_rng(0).permutation(len(data.rows))
        packing = pack(data.rows.sizes(), length=length, block_size=block_size, order=order)
    return TrainBatches(data.rows, form, seed=0, packing=packing, prefetch=prefetch)


def report_flops(asked, data, models: dict[str, ModelConfig]) -> None:
    print(f"\nFLOPs of a step, MARS / AR; batches of {asked.rows} rows, mean of {asked.batches}\n")
    print("| rows | B | tokens | supervised | noisy | " + " | ".join(models) + " |")
    print("|---" * (5 + len(models)) + "|")
    for length, packed in SHAPES:
        for block_size in asked.block_sizes:
            source = batches(data, block_size, asked.rows, length, packed)
            seen = []
            for _ in range(asked.batches):
                batch = next(source)
                filled, supervised = (batch.segments > 0).mean(), (batch.weights > 0).mean()
                seen.append((filled, supervised, source.target_rows, needed_target_rows(batch, 1)))
            source.close()
            ratios = []
            for model in models.values():
                cost = {
                    name: sum(step_flops(model, name, block_size, asked.rows, length, one[i]) for one in seen)
                    for name, i in (("mars", 2), ("sft", 3))
                }
                ratios.append(f"{cost['mars'] / cost['sft']:.2f}")
            filled, supervised, noisy = (np.mean([one[i] for one in seen]) for i in range(3))
            print(
                f"| {length}{', packed' if packed else ''} | {block_size} | {filled:.1%} | {supervised:.1%} | "
                f"{noisy / length:.1%} | {' | '.join(ratios)} |",
                flush=True,
            )


class Timed:
    """A step whose programs are compiled apart."""

    def __init__(self, source: str, objective: str, block_size: int):
        self.model = load(source, layout="stacked", mesh=MESH, with_mask_token=True).model
        self.step, optimizer = make_step(self.model.config, objective, block_size, "auto")
        self.state = new_state(self.model, optimizer, 0, MESH)
        self.programs: dict = {}

    def __call__(self, batch, target_rows: int) -> tuple[float, float]:
        """(wall, processor) seconds."""
        key = (batch.tokens.shape, target_rows)
        with jax.set_mesh(MESH):
            if key not in self.programs:
                self.programs[key] = self.step.lower(self.state, batch, target_rows).compile()
            return timed(lambda: self._run(self.programs[key], batch))[1:]

    def _run(self, program, batch) -> None:
        self.state, _ = jax.block_until_ready(program(self.state, batch))


def timed(work):
    """What `work` gives, wall seconds, processor seconds."""
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    found = work()
    wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF)
    return found, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report_seconds(asked, data) -> None:
    print(f"\nSeconds of a step (SmolLM2-135M, float32), medians of {asked.steps}\n")
    print(
        "| rows | B | supervised | noisy | AR s | MARS s | ratio (wall) | ratio (CPU) | FLOPs | input ms | of a step |"
    )
    print("|---" * 11 + "|")
    for block_size in asked.block_sizes:
        steps = {name: Timed(asked.model, name, block_size) for name in ("sft", "mars")}
        config = steps["mars"].model.config
        for rows, (length, packed) in zip((2, 1, 1), SHAPES, strict=True):
            if length not in asked.lengths:
                continue
            source = batches(data, block_size, rows, length, packed)
            runs, inputs, shares, counted = {name: [] for name in steps}, [], [], dict.fromkeys(steps, 0.0)
            for i in range(asked.steps + 1):
                batch, making, _ = timed(lambda source=source: next(source))
                placed, placing, _ = timed(lambda batch=batch, rows=rows: place(batch, rows))
                wanted = {"mars": source.target_rows, "sft": needed_target_rows(batch, 1)}
                for name, step in steps.items():
                    first = (placed.tokens.shape, wanted[name]) not in step.programs
                    if first:
                        step(placed, wanted[name])  # touches its memory for the first time
                    found = step(placed, wanted[name])
                    if i:
                        runs[name].append(found)
                        counted[name] += step_flops(config, name, block_size, rows, length, wanted[name])
                if i:
                    inputs.append(making + placing)
                    shares.append(((batch.weights > 0).mean(), source.target_rows / length))
            source.close()
            wall, cpu = ({name: statistics.median(r[i] for r in runs[name]) for name in steps} for i in (0, 1))
            supervised, noisy = np.mean(shares, axis=0)
            spent = statistics.median(inputs)
            print(
                f"| {rows} x {length}{', packed' if packed else ''} | {block_size} | {supervised:.1%} | {noisy:.1%} | "
                f"{wall['sft']:.2f} | {wall['mars']:.2f} | {wall['mars'] / wall['sft']:.2f} | "
                f"{cpu['mars'] / cpu['sft']:.2f} | {counted['mars'] / counted['sft']:.2f} | "
                f"{1e3 * spent:.1f} | {spent / wall['mars']:.2%} |",
                flush=True,
            )


def place(batch, rows: int):
    return jax.block_until_ready(place_batch(batch, 1, rows, batch_sharding(MESH, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="gsm8k_train.jsonl, or another file of conversations")
    parser.add_argument("--model", default=None)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="rows to time")
    parser.add_argument("--rows", type=int, default=16, help="a batch, for FLOPs")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    asked.model = asked.model or default_model()

    pretrained = load(asked.model, weights=False, with_mask_token=True)
    data = SimpleNamespace(mask_id=pretrained.mask_id, end_id=turn_end_id(pretrained.tokenizer))
    data.rows = load_rows(
        f"jsonl:{asked.data}", pretrained.tokenizer, length=512, mask_id=data.mask_id, end_id=data.end_id
    )
    print(data.rows.stats)
    shapes = {size: KNOWN[f"Qwen/Qwen2.5-{size}-Instruct"] for size in ("0.5B", "7B")}
    report_flops(asked, data, {"the model": pretrained.model.config, **shapes})
    if asked.seconds:
        report_seconds(asked, data)


if __name__ == "__main__":
    main()
