"""`marsjax demo`: a small model of the project's own goes from one token a forward pass to several.

The AR checkpoint in `marsjax/assets/demo_ar` was made by `marsjax train configs/demo_ar.yaml`.
"""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from marsjax import weights
from marsjax.data.problems import Problem, problem
from marsjax.decoding.generator import Generator
from marsjax.decoding.result import Result
from marsjax.evaluation import report as reports
from marsjax.evaluation import shading, sweep
from marsjax.training import AnotherRun, ConfigError, TrainConfig, TrainResult, load_config, train

TAUS = (1.0, 0.995, 0.99, 0.95, 0.9, 0.8, 0.7)
CONTROL_TAUS = (0.99, 0.9, 0.7)  # at 1 it is the AR model itself
MAX_NEW_TOKENS = 96
BATCH_SIZE = 64
ACCURACY_SPENT = 0.02  # the best τ is the fastest that costs at most this much accuracy


def assets() -> Path:
    """Directory of the files that come with the package."""
    with as_file(files("marsjax") / "assets") as path:
        return path


def demo(
    out: Path, *, quick: bool = False, seed: int = 0, problems: int = 384, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Fine-tunes the embedded AR model with MARS, decodes held-out problems, writes report.json and report.html.

    Args:
      out: directory; the training run goes to `out/training` and its export to `out/training/export`.
      quick: a tenth of the training and few problems, to see that everything works.
      seed: of the order of the training data.
      problems: held-out problems to decode.
      overrides: `section.key=value` of the training configuration.

    Returns the report. Raises ValueError for fewer problems than one; ConfigError if `out` holds another demo.
    """
    if problems < 1:
        raise ValueError(f"problems={problems} leaves nothing to decode; give at least 1")
    began = time.perf_counter()
    source = assets() / "demo_ar"
    quick_overrides = ["optimizer.steps=40", "evaluation.rows=64", "evaluation.decode_prompts=0"] if quick else []
    config = load_config(
        assets() / "demo_mars.yaml",
        [
            f"model.source={source}", f"output.directory={out / 'training'}", f"data.seed={seed}",
            *quick_overrides, *overrides,
        ],
    )  # fmt: skip
    if config.output.export == "none" or config.checkpoint.stop_after is not None:
        raise ValueError("the demo decodes what it trained: leave output.export=none and checkpoint.stop_after out")
    rich.print(f"[bold]1. Fine-tuning with MARS[/bold] (block size {config.objective.block_size}), from {source}")
    trained = _train(config, out, quick)
    assert trained.export is not None

    count = BATCH_SIZE if quick else problems
    held_out = [problem(seed, i, "test") for i in range(count)]
    rich.print(f"[bold]2. Decoding {count} held-out problems[/bold]")
    start = weights.load(source, with_mask_token=True)
    tuned = weights.load(trained.export)
    block_size = config.objective.block_size
    before = _Decoder(Generator(start, strategy="ar"), held_out)
    control = _Decoder(Generator(start, strategy="mars", window=block_size), held_out)
    one_token = _Decoder(Generator(tuned, strategy="ar"), held_out)
    mars = _Decoder(Generator(tuned, strategy="mars", window=block_size), held_out)
    verified = _Decoder(Generator(tuned, strategy="comb", k=block_size), held_out)

    table = _table()
    ar_results = before.run(None)
    report: dict[str, Any] = {"ar": before.score(ar_results, ar_results)}
    _add(table, "AR, before MARS", report["ar"])
    reference = one_token.run(None)
    report["mars_one_token"] = one_token.score(reference, reference)
    _add(table, "AR, after MARS", report["mars_one_token"])
    report["verified"] = verified.score(verified.run(None), reference)
    _add(table, "verified (comb)", report["verified"])
    by_tau = {tau: mars.run(tau) for tau in TAUS}
    report["mars"] = [{"tau": tau, **mars.score(results, reference)} for tau, results in by_tau.items()]
    report["control"] = [{"tau": tau, **control.score(control.run(tau), ar_results)} for tau in CONTROL_TAUS]
    for name in ("mars", "control"):
        for row in report[name]:
            _add(table, f"{'MARS' if name == 'mars' else 'control'}, τ = {row['tau']:g}", row)
    rich.print(table)
    rich.print("[dim]verified: the model checks what its masks guess; control: before MARS, shown the same masks[/dim]")

    report["best"] = _best(report["mars"])
    report["example"] = _example(held_out, by_tau, tuned.tokenizer)
    report |= {
        "train_seconds": trained.seconds,
        "seconds": time.perf_counter() - began,
        "quick": quick,
        "seed": seed,
        "batch_size": BATCH_SIZE,
        "block_size": block_size,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "training": dataclasses.asdict(config),
        "model": str(trained.export),
    }
    best, one = report["best"], report["mars"][0]
    report["summary"] = (
        f"Fine-tuned for {trained.steps} steps in {trained.seconds:.0f} s. At τ = {best['tau']:g}: "
        f"{best['tokens_per_forward']:.2f} tokens per forward, {best['accuracy']:.1%} right "
        f"(τ = 1: {one['accuracy']:.1%}; before MARS: {report['ar']['accuracy']:.1%})."
    )
    _show_example(report["example"], by_tau[best["tau"]], tuned.tokenizer)
    reports.write_json(out / "report.json", report)
    reports.write_html(out / "report.html", report)
    rich.print(report["summary"])
    rich.print(f"Report: {out / 'report.html'}   numbers: {out / 'report.json'}   model: {trained.export}")
    return report


def _train(config: TrainConfig, out: Path, quick: bool) -> TrainResult:
    try:
        return train(config)
    except AnotherRun as error:
        kind = "quick demo" if quick else "demo"
        raise ConfigError(
            f"{out} holds a demo of other settings than this {kind} has (--quick, --seed, --set); write to another "
            f"directory (--out), or delete {out} to start anew"
        ) from error


class _Decoder:
    """One way of decoding the held-out problems."""

    def __init__(self, generator: Generator, problems: Sequence[Problem]):
        self.generator, self.problems = generator, problems

    def run(self, tau: float | None) -> list[Result]:
        return sweep.decode(
            self.generator, self.problems, tau=tau, batch_size=BATCH_SIZE, max_new_tokens=MAX_NEW_TOKENS
        )

    def score(self, results: list[Result], reference: list[Result]) -> dict[str, Any]:
        return sweep.score(self.generator.tokenizer, self.problems, results, reference, batch_size=BATCH_SIZE)


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest τ < 1 that costs little; the most accurate one if none is so cheap."""
    one, *others = rows
    cheap = [row for row in others if row["accuracy"] >= one["accuracy"] - ACCURACY_SPENT]
    if cheap:
        return max(cheap, key=lambda row: row["tokens_per_forward"])
    return max(others, key=lambda row: row["accuracy"])


def _example(problems: Sequence[Problem], by_tau: dict[float, list[Result]], tokenizer) -> dict[str, Any]:
    """The first problem, at a careful, a middling and a careless threshold."""
    answers = []
    for tau in (1.0, 0.99, 0.8):
        result = by_tau[tau][0]
        answers.append(
            {
                "tau": tau,
                "text": result.text,
                "tokens": len(result.ids),
                "forwards": result.forwards,
                "chunks": [{"text": t, "tokens": n} for t, n in shading.chunk_texts(tokenizer, result)],
                "html": shading.for_html(tokenizer, result),
            }
        )
    return {"question": problems[0].question, "expected": problems[0].answer, "answers": answers}


def _show_example(example: dict[str, Any], results: list[Result], tokenizer) -> None:
    rich.print("[bold]3. One answer, a bar behind what each forward pass gave[/bold]")
    rich.print(example["question"])
    rich.print(shading.for_terminal(tokenizer, results[0]))


def _table() -> Table:
    table = Table(box=None)
    table.add_column("decoding", no_wrap=True)
    for name in ("accuracy", "tokens a forward", "phrases", "numbers", "tokens a second", "same as AR"):
        table.add_column(name, justify="right")
    return table


def _add(table: Table, name: str, row: dict[str, Any]) -> None:
    show: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("accuracy", "{:.1%}".format),
        ("tokens_per_forward", "{:.2f}".format),
        ("tokens_per_forward_phrases", "{:.2f}".format),
        ("tokens_per_forward_numbers", "{:.2f}".format),
        ("tokens_per_second", "{:,.0f}".format),
        ("identical_to_ar", "{:.1%}".format),
    )
    table.add_row(name, *(form(row[key]) for key, form in show))
