"""The paper's tables 5 and 6 (arXiv 2604.07023) on this project's own models.

    marsjax demo
    marsjax train configs/demo_draft.yaml
    marsjax train marsjax/assets/demo_mars.yaml model.source=runs/demo_draft/export \\
        output.directory=runs/demo_draft_mars optimizer.steps=800
    python benchmarks/demo_tables.py [--problems 64] [--rounds 3]

Table 5: the paper's block cache beside a cursor a row, and both beside AR, in batches that begin together and wait for
their slowest row. Table 6: a draft model in front of the demo's model, either or both of them fine-tuned with MARS.
Prints markdown. Speeds are medians of alternating rounds; every line says how many answers are right and equal to AR's.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from marsjax import weights
from marsjax.data.problems import Problem, problem
from marsjax.decoding.engine import Engine, run_all
from marsjax.decoding.generator import Generator
from marsjax.decoding.result import Result
from marsjax.demo import assets
from marsjax.evaluation import sweep

LIMIT = 96
CACHE_BLOCKS = (4, 8, 16, 32, 64, 128, 256)
WINDOWS = (8, 16, 32)


class Line:
    """One way to decode the held-out problems, `batch` at a time."""

    def __init__(self, generator: Generator, batch: int, tau: float | None = None):
        self.generator, self.batch, self.tau = generator, batch, tau
        self.engine: Engine = generator.engine(batch)
        self.results: list[Result] = []
        self.seconds: list[float] = []

    def run(self, held_out: list[Problem]) -> None:
        sums = self.engine.statistics
        began, steps = sums.decode_seconds + sums.prefill_seconds, sums.steps
        asked = [self.generator.spec(p.question, tau=self.tau, max_new_tokens=LIMIT) for p in held_out]
        batches = [asked[i : i + self.batch] for i in range(0, len(asked), self.batch)]
        self.results = [result for one in batches for result in run_all(self.engine, one)]
        self.seconds.append(sums.decode_seconds + sums.prefill_seconds - began)
        self.steps = sums.steps - steps

    @property
    def tokens(self) -> int:
        return sum(len(r.ids) for r in self.results)

    @property
    def speed(self) -> float:
        return self.tokens / statistics.median(self.seconds)


def measured(lines: dict[str, Line], held_out: list[Problem], rounds: int) -> None:
    for line in lines.values():
        line.run(held_out)  # compiles, and is forgotten
        line.seconds.clear()
    for _ in range(rounds):
        for line in lines.values():
            line.run(held_out)


def table(titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print(flush=True)


def scores(line: Line, held_out: list[Problem], ar: Line) -> tuple[str, str]:
    said = sweep.score(line.generator.tokenizer, held_out, line.results, ar.results, batch_size=line.batch)
    return f"{said['accuracy']:.1%}", f"{said['identical_to_ar']:.1%}"


def table_5(mars: Generator, held_out: list[Problem], tau: float, rounds: int) -> None:
    print(f"\n## Block cache and cursor, τ = {tau}\n")
    for batch in (4, 8, 16):
        lines = {
            "ar": Line(mars.with_strategy(strategy="ar"), batch),
            "cursor, W = 4": Line(mars.with_strategy(strategy="mars", window=4), batch, tau),
        }
        for window in WINDOWS:  # what a block's masks reach for, at the same τ
            lines[f"cursor, W = {window}"] = Line(mars.with_strategy(strategy="mars", window=window), batch, tau)
        for size in CACHE_BLOCKS:
            lines[f"block, {size}"] = Line(mars.with_strategy(strategy="block", cache_block=size), batch, tau)
        measured(lines, held_out, rounds)
        ar, cursor = lines["ar"], lines["cursor, W = 4"]
        table(
            ("batch", "cache", "forwards of a batch", "× cursor", "tokens/s", "× ar", "slots a step", "right", "= ar"),
            [
                (
                    batch,
                    name,
                    f"{line.steps * batch / len(held_out):.1f}",
                    f"{line.steps / cursor.steps:.2f}",
                    f"{line.speed:,.0f}",
                    f"{line.speed / ar.speed:.2f}",
                    f"{line.engine.statistics.slots / line.engine.statistics.steps / batch:.1f}",
                    *scores(line, held_out, ar),
                )
                for name, line in lines.items()
            ],
        )


def table_6(
    targets: dict[str, Generator], drafts: dict[str, Any], held_out: list[Problem], k: int, rounds: int
) -> None:
    print(f"\n## With a draft model, K = {k}, batch 1\n")
    lines: dict[str, tuple[str, str, Line]] = {}

    def add(target: str, front: str, tau: float | None, **options: Any) -> None:
        generator = targets[target].with_strategy(**options)
        name = f"{target}, {front}, {tau}, {options.get('window')}"
        lines[name] = (target, front, Line(generator, 1, tau))

    for target in targets:
        add(target, "–", None, strategy="ar")
    for target in targets:
        for draft, model in drafts.items():
            options = {"strategy": "speculative", "draft": model, "k": k}
            wide = {"draft_window": 4} if draft == "MARS" else {}
            add(target, draft, None, **options, **wide)
            if target == "MARS":
                for tau in (0.99, 0.95):
                    add(target, draft, tau, window=4, **options, **wide)
    measured({name: line for name, (_, _, line) in lines.items()}, held_out, rounds)
    first = {target: next(line for t, _, line in lines.values() if t == target) for target in targets}
    rows = []
    for target, draft, line in lines.values():
        forwards, drafted = (sum(getattr(r, n) for r in line.results) for n in ("forwards", "draft_forwards"))
        rows.append(
            (
                target, draft, "1" if line.tau is None else line.tau, f"{line.tokens / forwards:.2f}",
                f"{drafted / forwards:.0f}", f"{line.speed:,.0f}", f"{line.speed / first[target].speed:.2f}",
                *scores(line, held_out, first[target]),
            )
        )  # fmt: skip
    table(
        ("target", "draft", "τ", "tokens a target forward", "draft forwards for each", "tokens/s", "× ar", "right",
         "= ar"),
        rows,
    )  # fmt: skip


def main(
    *,
    model: Path = Path("demo-out/training/export"),
    draft: Path = Path("runs/demo_draft/export"),
    draft_mars: Path = Path("runs/demo_draft_mars/export"),
    problems: int = 64,
    k: int = 4,
    tau: float = 0.95,
    rounds: int = 3,
    tables: tuple[int, ...] = (5, 6),
    held_out_seed: int = 100,
) -> None:
    held_out = [problem(held_out_seed, i, "test") for i in range(problems)]
    mars = Generator(weights.load(model))
    chosen: dict[int, Callable[[], None]] = {
        5: lambda: table_5(mars, held_out, tau, rounds),
        6: lambda: table_6(
            {"AR": Generator(weights.load(assets() / "demo_ar"), strategy="ar"), "MARS": mars},
            {"AR": weights.load(draft), "MARS": weights.load(draft_mars)},
            held_out, k, rounds,
        ),
    }  # fmt: skip
    for number in tables:
        chosen[number]()


if __name__ == "__main__":
    tyro.cli(main)
