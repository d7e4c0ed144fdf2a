"""`marsjax demo --model smollm2`: a published instruct model, untouched, with a small adapter that foresees its text.

The adapter in `marsjax/assets/smollm2_mtp` was made by `marsjax train configs/smollm2_gsm8k_mtp.yaml`, on answers of at
most 200 tokens (docs/adapters.md).
"""

import html
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import rich
from rich.table import Table

from marsjax.decoding.generator import Generator
from marsjax.decoding.result import Result
from marsjax.demo import assets
from marsjax.evaluation import report as reports
from marsjax.evaluation import shading
from marsjax.weights.adapters import open_adapter

SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = (
    "A baker fills 6 trays with 12 rolls each and sells 50 rolls. How many rolls are left?",
    "Nora walks 3 kilometres to school and 3 kilometres back, five days a week. How far does she walk in 4 weeks?",
    "A ticket costs 7 dollars. A family of 4 pays with a 50 dollar bill. How much change do they get?",
    "Tim has twice as many marbles as Ana, and together they have 36. How many does Tim have?",
    "A tank holds 240 litres. A pump empties 15 litres a minute. After 10 minutes, how much is left?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a neighbour whose dog barks at night.",
    "List five things to take along on a day's hike.",
)


def demo(
    out: Path,
    *,
    source: str = SOURCE,
    adapter: Path | None = None,
    max_new_tokens: int = 128,
    questions: tuple[str, ...] = QUESTIONS,
) -> dict[str, Any]:
    """Answers the questions one at a time, by the model alone and with the adapter; writes report.json and report.html.

    Args:
      source: the model: directory, hub id or .gguf file.
      adapter: None: the one that comes with the package, for SmolLM2-135M-Instruct.

    Returns the report, which says how many texts are equal: all in one arithmetic, and elsewhere all but where two
    tokens are nearly as likely and programs of other shapes round otherwise. Raises ValueError for an adapter that is
    not gated.
    """
    adapter = assets() / "smollm2_mtp" if adapter is None else adapter
    if (config := open_adapter(adapter).config) is not None and not config.gated:
        raise ValueError(
            f"the adapter in {adapter} is not gated: it changes the model's answers, which here are to stay"
        )
    out.mkdir(parents=True, exist_ok=True)
    rich.print(f"[bold]1. Loading[/bold] {source}, and beside it {adapter}")
    ahead = Generator.load(source, adapter=adapter)
    alone = Generator.load(source, strategy="ar")
    rich.print(
        f"[bold]2. Answering {len(questions)} questions[/bold], one at a time, each way (the first compiles); a bar "
        "stands behind what each forward pass gave"
    )
    rows: list[dict[str, Any]] = []
    size: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    for generator in (alone, ahead):
        generator.generate(questions[0], **size)  # compile and warm up
    for question in questions:
        one, several = alone.generate(question, **size), ahead.generate(question, **size)
        rich.print(f"\n[italic]{question}[/italic]")
        rich.print(shading.for_terminal(ahead.tokenizer, several))
        rich.print(f"[dim]{_said(one, several)}[/dim]")
        rows.append({"question": question, "alone": asdict(one), "with_adapter": asdict(several),
                     "html": shading.for_html(ahead.tokenizer, several)})  # fmt: skip
    report = _summary(rows) | {
        "source": str(source),
        "adapter": str(adapter),
        "plan": ahead.plan.name,
        "slots": ahead.plan.size,
        "machine": f"{jax.default_backend()}: {platform.machine()}, {os.cpu_count()} cores",
        "note": f"A pass with the adapter is one of {ahead.plan.size} slots. Where arithmetic is the limit, as on a "
        "processor, it takes longer than one of a single slot; where reading the weights is, as on a TPU at small "
        "batches, about as long.",
        "answers": rows,
    }
    table = Table(box=None)
    for name in ("", "forward passes", "tokens a pass", "tokens a second"):
        table.add_column(name, justify="left" if not name else "right")
    for name, label in (("alone", "alone"), ("with_adapter", "with the adapter")):
        table.add_row(
            label, f"{report[name]['forwards']}",
            f"{report[name]['tokens_per_forward']:.2f}", f"{report[name]['tokens_per_second']:.1f}",
        )  # fmt: skip
    rich.print(table)
    reports.write_json(out / "report.json", report)
    (out / "report.html").write_text(_page(report), encoding="utf-8")
    rich.print(f"{report['summary']} {report['note']}")
    rich.print(f"Report: {out / 'report.html'}   numbers: {out / 'report.json'}")
    return report


def _said(one: Result, several: Result) -> str:
    text = "the same text" if one.ids == several.ids else f"another text ({len(one.ids)} tokens)"
    return (
        f"{len(several.ids)} tokens in {several.forwards} forward passes ({several.tokens_per_forward:.2f} a pass), "
        f"{several.seconds:.2f} s; alone {one.seconds:.2f} s, {text}"
    )


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in ("alone", "with_adapter"):
        results = [row[name] for row in rows]
        tokens, forwards, seconds = (
            sum(len(r["ids"]) for r in results), sum(r["forwards"] for r in results), sum(r["seconds"] for r in results)
        )  # fmt: skip
        report[name] = {
            "tokens": tokens,
            "forwards": forwards,
            "seconds": seconds,
            "tokens_per_forward": tokens / max(1, forwards),
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }
    one, several = report["alone"], report["with_adapter"]
    report["equal"] = sum(row["alone"]["ids"] == row["with_adapter"]["ids"] for row in rows)
    same = "all" if report["equal"] == len(rows) else f"{report['equal']} of {len(rows)} of them"
    report["summary"] = (
        f"{several['tokens']} tokens of {len(rows)} answers, {same} the same with and without the adapter, in "
        f"{several['forwards']} forward passes in place of {one['forwards']}: {several['tokens_per_forward']:.2f} a "
        "pass, and "
        f"{one['seconds'] / max(several['seconds'], 1e-9):.2f} times as fast here."
    )
    return report


def _page(report: dict[str, Any]) -> str:
    answers = "".join(
        f"<p class=question>{html.escape(row['question'])}</p><p>{len(row['with_adapter']['ids'])} tokens in "
        f"{row['with_adapter']['forwards']} forward passes</p><div class=answer>{row['html']}</div>"
        for row in report["answers"]
    )
    source = report["source"]
    name = Path(source).name if Path(source).exists() else source
    lead = (
        f"{html.escape(name)} with an adapter that acts on masks only, and leaves the model's own answers as they are. "
        f"{html.escape(report['summary'])} ({html.escape(report['machine'])})"
    )
    title = f"{report['with_adapter']['tokens_per_forward']:.2f} tokens per forward pass"
    return reports.page(title, lead, reports.legend() + answers, html.escape(report["note"]))
