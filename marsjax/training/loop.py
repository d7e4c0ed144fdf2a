"""The training loop."""

import gc
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from flax import nnx
from jax.sharding import Mesh

from marsjax.data.mixture import MixedRows
from marsjax.models import Decoder
from marsjax.models.adapters import join
from marsjax.parallel.ahead import TPU_COMPILER_OPTIONS
from marsjax.parallel.slices import chip_of
from marsjax.parallel.start import LateAgreement, agree, is_main, start_processes
from marsjax.training import base_model, setup
from marsjax.training import evaluate as held_out
from marsjax.training.checkpoints import Checkpoints, SaveError
from marsjax.training.config import AnotherRun, ConfigError, TrainConfig, differences
from marsjax.training.export import as_pretrained, write
from marsjax.training.metrics import Clock, MetricsWriter, Reporter
from marsjax.training.objectives import Forward, check_aligned
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.plan import model_flops
from marsjax.training.state import Params, abstract_state, copy_as_list, new_state, parted, rebuild
from marsjax.training.step import batch_sharding, make_train_step, place_batch, place_whole
from marsjax.training.stopping import StopAsked
from marsjax.weights import Pretrained
from marsjax.weights.adapters import fingerprint

_LAST_WAIT = 300.0  # seconds for a checkpoint under way when a process ends in an error


class TrainingDiverged(RuntimeError):
    """Loss or gradient became infinite or NaN; the message holds the step."""


@dataclass
class TrainResult:
    """directory: of the run; export: None if not exported. best: {"step", "loss"} by held-out loss. final: the last
    held-out evaluation, or the last training metrics where there is none. seconds: of all runs that made it."""

    directory: Path
    export: Path | None
    steps: int
    best: dict[str, Any] | None
    final: dict[str, Any]
    seconds: float


@dataclass
class _Progress:
    """What a checkpoint remembers beside the state."""

    best: dict[str, Any] | None = None
    final: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    evaluated: int = 0  # the last step that was


def train(config: TrainConfig) -> TrainResult:
    """Runs, or goes on with, a training run; see `marsjax.training.config` for what can be set.

    A run goes on by itself from the checkpoints in its output directory, bitwise as if it had never stopped.

    Raises ConfigError (AnotherRun when the directory holds a run of another configuration), DataError,
    TrainingDiverged, checkpoints.SaveError; and, once it has saved what there is, KeyboardInterrupt after Ctrl-C or
    SIGTERM, and whatever made an evaluation fail.
    """
    p = config.parallel
    start_processes(p.coordinator, p.processes, p.process_id, start_timeout=p.start_timeout)
    platform = setup.check_platform(config)
    setup.check_processes(config, jax.process_count())
    forward = setup.make_forward(config, platform)
    mesh = setup.make_mesh(config)
    directory = Path(config.output.directory).expanduser()
    _check_same_run(directory, config)
    _check_writable(directory)
    setup.check_shared(directory)
    described = base_model.describe_model(config)  # what is wrong shall be said before gigabytes are read
    setup.check_mesh(config, described.model.config, mesh)
    base_model.check_adapter(config, described.model.config)
    data = setup.load_data(config, described, mesh)
    run = None
    try:
        run = _Run(config, directory, base_model.load_model(config, mesh, forward.dtype), data, forward, mesh)
        result = run.go()
    except BaseException as error:
        if jax.process_count() > 1:  # now: others may have to be waited for
            print(f"process {jax.process_index()} ends: {error!r}", file=sys.stderr, flush=True)
        if run is not None:
            run.close(failed=True)
        raise
    finally:
        data.batches.close()
    run.close()
    return result


def _check_same_run(directory: Path, config: TrainConfig) -> None:
    """Before any long work: a directory with checkpoints of another configuration is refused."""
    saved, checkpoints = directory / "config.yaml", directory / "checkpoints"
    if not (saved.exists() and checkpoints.is_dir() and any(checkpoints.iterdir())):
        return
    old = _saved_config(saved)
    if found := differences(old, config.to_dict()):
        further = "adapter.source" if (old.get("adapter") or {}).get("rank") else "model.source"
        raise AnotherRun(
            f"{directory} holds checkpoints of another configuration:\n  "
            + "\n  ".join(found)
            + f"\nchoose another output.directory, or delete this one to start anew; to train its result further, "
            f"take its export as {further}"
        )


def _saved_config(path: Path) -> dict[str, Any]:
    problem = "it holds no sections"
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(there, dict) and all(isinstance(section, dict) for section in there.values()):
            return there
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = str(error)
    raise ConfigError(
        f"{path} is damaged ({problem}), so nobody knows which run the checkpoints beside it belong to; choose another "
        "output.directory, or delete this file to go on from them unasked"
    )


def _check_writable(directory: Path) -> None:
    """Before any long work: a place where the first checkpoint could not be written is refused."""
    probe = directory / f".probe-{jax.process_index()}-{os.getpid()}"  # containers on several hosts share numbers
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output.directory={directory} cannot be written: {error}; choose another, or make room or rights there"
        ) from error


class _Run:
    def __init__(
        self,
        config: TrainConfig,
        directory: Path,
        pretrained: Pretrained,
        data: setup.TrainData,
        forward: Forward,
        mesh: Mesh,
    ):
        self.config, self.directory, self.data, self.mesh = config, directory, data, mesh
        self.model_config = pretrained.model.config
        self.steps = setup.total_steps(config, data.batches)
        self.alignment = config.objective.alignment if config.objective.has_masks else None
        self.pretrained, self.dtype = pretrained, forward.dtype
        unroll = config.compute.unroll_layers
        schedule = make_schedule(config.optimizer, self.steps)
        optimizer = make_optimizer(config.optimizer, schedule)
        objective = setup.make_objective(config, forward)
        self.train_step = make_train_step(
            self.model_config,
            objective,
            optimizer,
            schedule,
            mesh=mesh,
            unroll=unroll,
            compiler_options=TPU_COMPILER_OPTIONS if jax.default_backend() == "tpu" else None,
        )
        self.micro_rows = config.data.batch_size // config.data.accumulation
        self.batch_sharding = batch_sharding(mesh, self.micro_rows)
        self.eval_step = setup.make_evaluation(config, self.model_config, forward)
        # What an adapter is trained beside is read anew by every start, and must be the same.
        self.base = None if self.model_config.adapter is None else fingerprint(pretrained.model)
        self.frozen = parted(self.model_config, nnx.to_pure_dict(nnx.state(pretrained.model)))[1]
        self.state = new_state(pretrained.model, optimizer, config.compute.seed, mesh)
        self.like = abstract_state(self.model_config, optimizer, mesh)
        pretrained.model = None  # type: ignore[assignment]  # its arrays are the state's now, and will be donated
        self.compiled: dict[int, float] = {}  # target rows of a program → see _model_flops
        self.tracing = False
        self.attention = forward.attention
        self.progress = _Progress()
        self.checkpoints = Checkpoints(directory / "checkpoints", keep=config.checkpoint.keep)
        self._resume()
        self.start = int(self.state.step)
        self._check_room()
        main = is_main()
        self.writer = MetricsWriter(directory, tensorboard=config.output.tensorboard, step=self.start) if main else None
        self.reporter = Reporter(self.steps, self.start, shown=main)
        if main:
            part = directory / "config.yaml.part"
            part.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False), encoding="utf-8")
            part.replace(directory / "config.yaml")

    def _check_room(self) -> None:
        needed, free = sum(x.nbytes for x in jax.tree.leaves(self.state)), shutil.disk_usage(self.directory).free
        if self.start < self.steps and free < needed:
            raise ConfigError(
                f"output.directory={self.directory} has {free / 1e9:.3g} GB free, and a checkpoint takes "
                f"{needed / 1e9:.3g} GB; make room, or choose another"
            )

    def _resume(self) -> None:
        if agree(bool(self.checkpoints.steps())):
            host = self._read()
            if host.get("base") != self.base:
                raise AnotherRun(
                    f"the checkpoints in {self.checkpoints.directory} belong to an adapter of other weights than "
                    f"model.source={self.config.model.source} has now; give the same, or choose another "
                    "output.directory"
                )
            self.data.batches.restore(host["data"])
            known = {f.name for f in fields(_Progress)}
            self.progress = _Progress(**{name: value for name, value in host["progress"].items() if name in known})

    def _read(self, step: int | None = None) -> dict[str, Any]:
        """Puts a checkpoint in the state's place; the old state goes first, so that memory never holds two."""
        del self.state
        gc.collect()  # modules refer to themselves, so those given up may still hold arrays
        restored = self.checkpoints.restore(self.like, step)
        assert restored is not None
        self.state, host = restored
        return host

    def go(self) -> TrainResult:
        began, before = time.perf_counter(), self.progress.seconds
        config, reporter = self.config, self.reporter
        last = min(self.steps, config.checkpoint.stop_after or self.steps)
        if self.start:
            reporter.note(f"resumed at step {self.start} of {self.steps} from {self.checkpoints.directory}")
        packing = self.data.batches.packing
        rows = self.data.batches.rows
        # Of a mixture also the rows of an epoch by source, of which there may be fewer than were looked at.
        mixed = f"{rows.name}: {len(rows)} rows an epoch" if isinstance(rows, MixedRows) else ""
        told = [f"data: {rows.stats}", mixed, str(packing or "")]
        reporter.note("; ".join(filter(None, told)))
        if self.start and self._evaluation_due(self.start) and self.progress.evaluated != self.start:
            self._evaluate(self.start)  # it failed when the run was here before
        pending, asked = _Pending(self), LateAgreement()
        with StopAsked() as stop:
            for step in range(self.start + 1, last + 1):
                self._profile(step)
                pending.swap(step, *self._advance(pending.clock))
                ends = asked(bool(stop))
                evaluates = self._evaluation_due(step) and not ends
                saves = step % config.checkpoint.every == 0 or step == last or ends
                if evaluates or saves:
                    pending.flush()  # a diverged state must end the run before it is saved
                    paused = time.perf_counter()
                    try:
                        saves |= evaluates and self._evaluate(step)
                    except BaseException:
                        saves |= jax.process_count() == 1  # of several, one alone cannot save
                        raise
                    finally:
                        if saves:
                            self.progress.seconds = before + time.perf_counter() - began
                            self._save()
                    pending.clock.skip(paused)
                reporter.step(step)
                if ends:
                    self.checkpoints.wait()
                    raise KeyboardInterrupt(f"stopped and saved at step {step}; the same command goes on from there")
            self.checkpoints.wait()
        done = int(self.state.step)
        export = self._export() if last == self.steps else None
        seconds = before + time.perf_counter() - began
        return TrainResult(self.directory, export, done, self.progress.best, self.progress.final, seconds)

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.evaluation.every
        return self.data.held_out is not None and (step % every == 0 or step == self.steps)

    def _advance(self, clock: Clock) -> tuple[dict[str, Any], float | None]:
        """(metrics of a step, its model FLOPs as `_model_flops`, None where its time does not count)."""
        batches = self.data.batches
        batch = next(batches)
        if self.alignment is not None and self.attention != "dense":
            check_aligned(batch, self.alignment)
        target_rows = batches.target_rows
        since = time.perf_counter()
        batch = place_batch(batch, self.config.data.accumulation, self.micro_rows, self.batch_sharding)
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.train_step(self.state, batch, target_rows, self.frozen)
        if target_rows in self.compiled:
            return metrics, self.compiled[target_rows]
        # A program of its own, whose compilation is no part of the rate.
        jax.block_until_ready(metrics)
        self.compiled[target_rows] = self._model_flops(target_rows)
        clock.skip(since)
        return metrics, None

    def _model_flops(self, target_rows: int) -> float:
        """Of a step, over what all chips can do in a second; 0 where that is not known."""
        chip = chip_of(jax.devices()[0].device_kind)
        if chip is None:
            return 0.0
        work = model_flops(self.config, self.model_config, self.mesh, target_rows)
        return work / (chip.flops * self.mesh.size)

    def _profile(self, step: int) -> None:
        """Traces `output.profile_steps` steps from `output.profile_at` on."""
        begin, count = self.config.output.profile_at, self.config.output.profile_steps
        if step == begin:
            jax.profiler.start_trace(str(self.directory / "profile"))
            self.tracing = True
        elif self.tracing and begin is not None and step >= begin + count:
            jax.block_until_ready(self.state.params)
            self._stop_trace()

    def _stop_trace(self) -> None:
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()
            self.reporter.note(f"profile written to {self.directory / 'profile'}")

    def _evaluate(self, step: int) -> bool:
        """Whether this is the best so far."""
        with jax.set_mesh(self.mesh):
            result = held_out.evaluate(
                self.eval_step,
                self._params(),
                self.data.held_out_batches(),
                alignment=self.alignment,
                place=partial(place_whole, mesh=self.mesh),
            )
        result |= self._decode()
        self.write(step, "eval", result)
        shown = {k: v for k, v in result.items() if isinstance(v, float)}
        self.reporter.note(f"evaluation at step {step}: " + "  ".join(f"{k} {v:.4g}" for k, v in shown.items()))
        self.progress.final, self.progress.evaluated = {"step": step, **result}, step
        best = self.progress.best
        if best is not None and not result["loss"] < best["loss"]:
            return False
        self.progress.best = {"step": step, "loss": result["loss"]}
        return True

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.write(step, kind, values)

    def _decode(self) -> dict[str, float]:
        section = self.config.evaluation
        if not self.data.decode_prompts:
            return {}
        return held_out.decode(
            lambda: self._as_pretrained(copy_as_list(self.model_config, self._params(), self.dtype)),
            self.data.decode_prompts,
            block_size=self.config.objective.block_size,
            tau=section.tau,
            max_new_tokens=section.max_new_tokens,
            objective=self.config.objective.name,
            dtype=self.dtype,
        )

    def _params(self) -> Params:
        """All of the model's."""
        return join(self.frozen, self.state.params)

    def _save(self) -> None:
        host = {"data": self.data.batches.state(), "progress": vars(self.progress), "base": self.base}
        best = self.progress.best
        self.checkpoints.save(self.state, host, best_step=best["step"] if best else None)

    def _as_pretrained(self, model: Decoder) -> Pretrained:
        return as_pretrained(self.config, self.pretrained, model, self.data.end_id)

    def _export(self) -> Path | None:
        which = self.config.output.export
        if which == "none":
            return None
        best = self.progress.best
        if which == "best" and best is not None and best["step"] != int(self.state.step):
            self._read(best["step"])
        model = rebuild(self.model_config, self._params())
        path = write(self.config, self._as_pretrained(model), self.directory / "export", norms=self.base)
        self.reporter.note(f"exported to {path}")
        return path

    def close(self, *, failed: bool = False) -> None:
        """Whatever ended the run, what is being written is not lost; after an error, of one of several processes, it is
        waited for only so long."""
        try:
            self.checkpoints.wait(_LAST_WAIT if failed and jax.process_count() > 1 else None)
        except SaveError as error:
            if not failed:
                raise
            print(error, file=sys.stderr, flush=True)
        finally:
            self._stop_trace()
            self.reporter.close()
            if self.writer is not None:
                self.writer.close()


class _Pending:
    """Metrics of the last step, read when the next one is under way, so that the device never waits for the host."""

    def __init__(self, run: _Run):
        self.run, self.clock = run, Clock()
        self._step = 0
        self._metrics: dict[str, Any] | None = None
        self._work: float | None = None
        self._window: list[dict[str, float]] = []

    def swap(self, step: int, metrics: dict[str, Any], work: float | None) -> None:
        self.flush()
        self._step, self._metrics, self._work = step, metrics, work

    def flush(self) -> None:
        if self._metrics is None:
            return
        values = {name: float(np.asarray(value)) for name, value in self._metrics.items()}
        step, self._metrics = self._step, None
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise TrainingDiverged(
                f"step {step}: {', '.join(f'{name} is {values[name]}' for name in bad)} (learning rate "
                f"{values['learning_rate']:.3g}). Lower optimizer.learning_rate or raise optimizer.warmup, in another "
                "output.directory: a run's checkpoints go on with its own settings only"
            )
        if self._work is not None:
            self.clock.add(values["tokens"], self._work)
        self._window.append(values)
        run = self.run
        if step % run.config.output.log_every == 0 or step in (1, run.steps):
            means = {name: float(np.mean([v[name] for v in self._window])) for name in values}
            means["learning_rate"] = values["learning_rate"]
            means |= {name: rate for name, rate in self.clock.read().items() if rate}
            self._window.clear()
            run.write(step, "train", means)
            shown = [name for name in means if name.startswith("loss")]
            shown += [name for name in ("gradient_norm", "tokens_per_second", "utilisation") if name in means]
            run.reporter.metrics(step, {name: means[name] for name in shown})
            if not run.progress.evaluated or run.data.held_out is None:
                run.progress.final = {"step": step, **means}
