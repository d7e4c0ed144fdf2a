"""Where numbers go: metrics.jsonl, TensorBoard, and the terminal."""

import json
import math
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class MetricsWriter:
    """One JSON object a line, flushed; and the same scalars as TensorBoard events if asked.

    On resume, lines of steps after the restored one are dropped, so that every step stands once.
    """

    def __init__(self, directory: Path, *, tensorboard: bool, step: int = 0):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            part = path.with_name(path.name + ".part")  # a kill between shall not lose what was measured
            part.write_text("".join(line + "\n" for line in kept))
            part.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Values may be nested; TensorBoard gets the finite numbers, under `kind/name`."""
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _step_of(line: str) -> float:
    """Infinity for a line that a crash cut short, so that it goes."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _scalars(values: Mapping[str, Any], prefix: str = ""):
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", value


class Reporter:
    """A progress bar on a terminal or in a notebook with widgets, plain lines elsewhere (logs, pipes)."""

    def __init__(self, total: int, start: int = 0, *, shown: bool = True):
        console = Console(file=sys.stdout)
        self._progress = None
        # Without ipywidgets rich shows nothing in a notebook but a warning.
        self._shown = shown  # by one of several processes
        if shown and (find_spec("ipywidgets") if console.is_jupyter else console.is_terminal):
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=console, transient=False)
            self._task = self._progress.add_task("", total=total, completed=start)
            self._progress.start()
        self._total = total

    def step(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        line = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=line)
        elif self._shown:
            print(f"step {step}/{self._total}  {line}", flush=True)

    def note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class Clock:
    """Work a second since it was last read, with pauses (evaluation, checkpoints, compilation) taken out."""

    def __init__(self) -> None:
        self._start, self._tokens, self._work = time.perf_counter(), 0.0, 0.0

    def add(self, tokens: float, work: float = 0.0) -> None:
        """`work`: model FLOPs, in seconds of all chips at their peak."""
        self._tokens += tokens
        self._work += work

    def read(self) -> dict[str, float]:
        """tokens_per_second, and utilisation: the share of the chips' peak that the model's FLOPs took."""
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        rates = {"tokens_per_second": self._tokens / seconds, "utilisation": self._work / seconds}
        self._start, self._tokens, self._work = now, 0.0, 0.0
        return rates

    def skip(self, since: float) -> None:
        """What ran from `since` (time.perf_counter) until now does not count."""
        self._start += time.perf_counter() - since
