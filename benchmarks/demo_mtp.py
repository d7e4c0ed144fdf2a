"""Ablations of multi-token prediction on the demo's frozen AR model: what each part gives, at exactly AR's answers.

    python benchmarks/demo_mtp.py --out runs/demo_mtp_ablations [--steps 200] [--problems 128] [--only "rank 4"]

Trains one adapter a row by configs/demo_mtp.yaml with the settings named, decodes the same held-out problems with
`comb` and `chain`, and prints markdown: the share of answers right, of answers equal to the base model's own (token for
token), tokens per forward, acceptance by depth. Runs that are there already are gone on with, so it can be stopped.
"""

import json
import time
from collections import Counter
from pathlib import Path

import tyro

from marsjax import weights
from marsjax.data.problems import problem
from marsjax.decoding.generator import Generator
from marsjax.decoding.statistics import accepted_by_depth
from marsjax.evaluation import sweep
from marsjax.training import load_config, train

LANES = 64
ROOT = Path(__file__).parents[1]
VARIANTS: dict[str, tuple[str, ...]] = {
    "rank 16": (),
    "rank 1": ("adapter.rank=1",),
    "rank 4": ("adapter.rank=4",),
    "rank 64": ("adapter.rank=64",),
    "without sampler": ("objective.sampler=false",),
    "sampler free running": ("objective.free_running=true",),
    "without LCM": ("objective.consistency=0",),
    "soft targets": ("objective.soft_targets=true",),
    "total variation": ("objective.tv_weight=1",),
    "ungated LoRA": ("adapter.gated=false",),
}
DECODED: dict[str, dict] = {
    "comb": {"strategy": "comb"},
    "comb, masks' own drafts": {"strategy": "comb", "sampler": False},
    "chain": {"strategy": "chain"},
}


def main(
    *,
    out: Path = Path("runs/demo_mtp_ablations"),
    steps: int = 200,
    problems: int = 128,
    batch: int = 16,
    k: int = 4,
    held_out_seed: int = 100,
    only: tuple[str, ...] = (),
) -> None:
    base, held_out = ROOT / "marsjax/assets/demo_ar", [problem(held_out_seed, i, "test") for i in range(problems)]
    reference = None
    print("| adapter | decoding | right | equal to the base | tokens per forward | accepted by depth | training, s |")
    print("|---" * 7 + "|")

    def show(name: str, decoding: str, generator: Generator, seconds: float | None) -> None:
        nonlocal reference
        results = sweep.decode(generator, held_out, tau=None, batch_size=LANES, max_new_tokens=96)
        reference = reference or results
        scored = sweep.score(generator.tokenizer, held_out, results, reference, batch_size=LANES)
        depths = accepted_by_depth(Counter(size for r in results for size in r.chunks))
        row = {"adapter": name, "decoding": decoding, "steps": steps, "depths": depths, "seconds": seconds, **scored}
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"| {name} | {decoding} | {scored['accuracy']:.1%} | {scored['identical_to_ar']:.1%} | "
            f"{scored['tokens_per_forward']:.2f} | {' '.join(f'{d:.2f}' for d in depths)} | "
            f"{'' if seconds is None else f'{seconds:.0f}'} |",
            flush=True,
        )

    out.mkdir(parents=True, exist_ok=True)
    show("none", "ar", Generator(weights.load(base), strategy="ar", lanes=LANES), None)
    for name, overrides in VARIANTS.items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        directory = out / name.replace(" ", "_")
        fixed = (
            f"data.batch_size={batch}",
            f"model.source={base}",
            f"output.directory={directory}",
            f"objective.block_size={k}",
        )
        quiet = (f"optimizer.steps={steps}", "evaluation.data=null", "evaluation.decode_prompts=0")
        run = train(load_config(ROOT / "configs/demo_mtp.yaml", [*fixed, *quiet, *overrides]))
        seconds = time.perf_counter() - began
        adapted = weights.load(base, adapter=run.export)
        if name == "ungated LoRA":
            show(name, "ar", Generator(adapted, strategy="ar", lanes=LANES), seconds)
        for decoding, options in DECODED.items():
            if "sampler" in options and name == "without sampler":
                continue
            show(name, decoding, Generator(adapted, k=k, lanes=LANES, **options), seconds)


if __name__ == "__main__":
    tyro.cli(main)
