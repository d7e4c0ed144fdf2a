"""A training step of this package beside the same objective written plainly in PyTorch, in one run on one machine.

    python benchmarks/train_speed.py --data gsm8k_train.jsonl [--shapes 8x128 2x256] [--steps 3]

MARS with B = 4 on real text: forward, backward, clipping and AdamW, float32, two threads. PyTorch runs both streams in
full through `scaled_dot_product_attention` under the dense boolean mask, and cross-entropy on the logits of all rows:
what one would write. `all rows` is ours without leaving rows out. Each engine has a process of its own, so that its
peak memory is its own; they take turns, a step each, on the same batches, and losses and gradient norms are compared.
Compilation and each engine's first step are apart. Processor seconds stand beside wall seconds for machines with other
work to do.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from decode_speed import default_model

BLOCK_SIZE, LEARNING_RATE, CLIP, DECAY = 4, 1e-5, 1.0, 0.01
ENGINES = ("ours", "all rows", "torch")
THREADS = "2"


class Ours:
    """The trainer's own step; `compact` False computes and scores all rows of both streams."""

    def __init__(self, model: str, compact: bool, unroll: bool):
        import jax

        from marsjax.parallel.sharding import make_mesh
        from marsjax.training import load_config, setup
        from marsjax.training.optimizer import make_optimizer, make_schedule
        from marsjax.training.state import new_state
        from marsjax.training.step import make_train_step
        from marsjax.weights import load

        self.jax, self.mesh, self.compact = jax, make_mesh(fsdp=1), compact
        decoder = load(model, layout="stacked", mesh=self.mesh, with_mask_token=True).model
        config = load_config(None, [
            f"model.source={model}", "data.train=jsonl:unused.jsonl", "output.directory=unused",
            f"objective.block_size={BLOCK_SIZE}",
            f"optimizer={{learning_rate: {LEARNING_RATE}, steps: 1, warmup: 0, final_fraction: 1.0}}",
            f"optimizer={{clip_norm: {CLIP}, weight_decay: {DECAY}}}", f"compute.unroll_layers={str(unroll).lower()}",
        ])  # fmt: skip
        objective = setup.make_objective(config, setup.make_forward(config, "cpu"))
        schedule = make_schedule(config.optimizer, 1)
        optimizer = make_optimizer(config.optimizer, schedule)
        self.step = make_train_step(decoder.config, objective, optimizer, schedule, mesh=self.mesh, unroll=unroll)
        self.state = new_state(decoder, optimizer, 0, self.mesh)
        self.programs: dict = {}

    def prepare(self, batch, target_rows: int):
        from marsjax.training.step import batch_sharding, place_batch

        n = len(batch.tokens)
        batch = place_batch(batch, 1, n, batch_sharding(self.mesh, n))
        rows = target_rows if self.compact else None
        with self.jax.set_mesh(self.mesh):
            if rows not in self.programs:
                self.programs[rows] = self.step.lower(self.state, batch, rows).compile()
        return rows, batch

    def __call__(self, prepared) -> tuple[float, float]:
        rows, batch = prepared
        with self.jax.set_mesh(self.mesh):
            self.state, metrics = self.programs[rows](self.state, batch)
        self.jax.block_until_ready(self.state)
        return float(metrics["loss"]), float(metrics["gradient_norm"])


class Torch:
    """transformers' Llama with its sdpa attention, under a mask of our own."""

    def __init__(self, directory: str):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(THREADS))
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        # The end token serves as padding in this model's files: PyTorch would leave its input row without gradient.
        self.model.model.embed_tokens.padding_idx = None
        self.model.train()
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}], lr=LEARNING_RATE
        )

    def prepare(self, batch, target_rows: int):
        torch = self.torch
        positions, segments = (torch.tensor(np.concatenate([x, x], axis=1)) for x in (batch.positions, batch.segments))
        length = batch.tokens.shape[1]
        noisy, block = torch.arange(2 * length) >= length, positions // BLOCK_SIZE
        q, k = (..., slice(None), None), (..., None, slice(None))
        mask = torch.where(
            noisy[k],
            noisy[q] & (block[q] == block[k]) & (positions[k] <= positions[q]),
            torch.where(noisy[q], block[k] < block[q], positions[k] <= positions[q]),
        )
        mask &= (segments[q] == segments[k]) & (segments[q] > 0)
        mask |= torch.eye(2 * length, dtype=torch.bool)  # padding sees itself, or its softmax is NaN
        ids = torch.tensor(np.concatenate([batch.tokens, batch.noisy], axis=1)).long()
        targets = np.where(batch.weights != 0, batch.targets, -100)
        return ids, positions.long(), mask[:, None], torch.tensor(np.concatenate([targets, targets], axis=1)).long()

    def __call__(self, prepared) -> tuple[float, float]:
        torch, (ids, positions, mask, targets) = self.torch, prepared
        logits = self.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        # Both streams predict the same tokens: half the mean over both is the mean over one.
        loss = 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()


def batches(data: str, model: str, rows: int, length: int):
    """Batches of the trainer's own pipeline, one document a row, cut at `length`."""
    from marsjax.data.batch import BatchFormat
    from marsjax.data.pipeline import TrainBatches, load_rows
    from marsjax.text.chat import turn_end_id
    from marsjax.weights import load

    pretrained = load(model, weights=False, with_mask_token=True)
    mask_id, end_id = pretrained.mask_id, turn_end_id(pretrained.tokenizer)
    form = BatchFormat(rows, length, BLOCK_SIZE, mask_id, end_id)
    found = load_rows(f"jsonl:{data}", pretrained.tokenizer, length=length, mask_id=mask_id, end_id=end_id)
    return TrainBatches(found, form, seed=0, prefetch=0)


def child(asked) -> None:
    """A step for each line read; the answer is a line of JSON."""
    from marsjax.data.batch import Batch

    engine = Torch(asked.model) if asked.child == "torch" else Ours(asked.model, asked.child == "ours", asked.unroll)
    for line in sys.stdin:
        with np.load(line.strip()) as file:
            batch = Batch(*(file[name] for name in Batch._fields))
            prepared = engine.prepare(batch, int(file["target_rows"]))
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        loss, norm = engine(prepared)
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        status = Path("/proc/self/status").read_text()
        peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
        print(json.dumps({"wall": wall, "cpu": cpu, "loss": loss, "norm": norm, "peak": peak}), flush=True)


def measure(asked, rows: int, length: int, engines: list[str], directory: str) -> dict[str, list[dict]]:
    source = batches(asked.data, asked.model, rows, length)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": THREADS}
    processes = {}
    for name in engines:
        command = [sys.executable, __file__, "--child", name, "--data", asked.data]
        command += ["--model", f"{directory}/model" if name == "torch" else asked.model]
        command += ["--unroll"] if asked.unroll else []
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    runs: dict[str, list[dict]] = {name: [] for name in engines}
    try:
        for i in range(asked.steps + 1):
            batch, path = next(source), f"{directory}/{rows}x{length}-{i}.npz"
            np.savez(path, **batch._asdict(), target_rows=source.target_rows)
            spoken = (batch.segments > 0).mean(), (batch.weights > 0).mean(), source.target_rows
            print(f"# {rows} x {length}, batch {i}: {spoken[0]:.0%} tokens, {spoken[1]:.0%} supervised, "
                  f"{spoken[2]} rows with a target", file=sys.stderr)  # fmt: skip
            for name, process in processes.items():
                process.stdin.write(f"{path}\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                answer = json.loads(process.stdout.readline())  # type: ignore[union-attr]
                print(f"#   {name}: {answer}", file=sys.stderr, flush=True)
                runs[name].append(answer)
    finally:
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="gsm8k_train.jsonl, or another file of conversations")
    parser.add_argument("--model", default=None)
    parser.add_argument("--shapes", nargs="+", default=["8x128", "2x256"], help="ROWSxTOKENS")
    parser.add_argument("--steps", type=int, default=3, help="measured; one more comes first")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--unroll", action="store_true", help="compute.unroll_layers")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.model = asked.model or default_model()
    if asked.child:
        return child(asked)

    print("| rows x tokens | engine | s a step | clean tokens/s | CPU s | × torch (wall) | (CPU) | peak GB "
          "| loss | gradient norm | largest difference |")  # fmt: skip
    print("|---" * 11 + "|")
    with tempfile.TemporaryDirectory() as directory:
        if "torch" in asked.engines:
            from marsjax import weights

            weights.save(weights.load(asked.model, with_mask_token=True), f"{directory}/model")
        for shape in asked.shapes:
            rows, length = (int(x) for x in shape.split("x"))
            runs = measure(asked, rows, length, list(asked.engines), directory)
            reference = runs.get("torch", runs[asked.engines[0]])
            for name, run in runs.items():
                wall, cpu = (statistics.median(step[key] for step in run[1:]) for key in ("wall", "cpu"))
                other = [statistics.median(step[key] for step in reference[1:]) for key in ("wall", "cpu")]
                off = max(
                    abs(a[key] / b[key] - 1) for a, b in zip(run, reference, strict=True) for key in ("loss", "norm")
                )
                print(
                    f"| {rows} x {length} | {name} | {wall:.2f} | {rows * length / wall:.1f} | {cpu:.2f} | "
                    f"{other[0] / wall:.2f} | {other[1] / cpu:.2f} | {run[-1]['peak'] / 1e9:.2f} | "
                    f"{run[0]['loss']:.5f} | {run[0]['norm']:.5f} | {off:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
