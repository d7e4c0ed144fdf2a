"""Checkpoints through orbax: parameters, moments, step, PRNG key, the data's position and the run's own notes."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from marsjax.parallel.start import agree, any_process, is_main
from marsjax.training.state import Params, TrainState

log = logging.getLogger(__name__)

HOST = "host"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of orbax's directories until they are whole


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message holds the step and where the newest good one is."""


class Restored(NamedTuple):
    params: Params
    step: int
    host: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and the best by the evaluation's loss.

    Saving returns when the state has left the devices, which may then go on; the files are written meanwhile. Their
    fate is asked for before the next save and by `wait`: a failing writer ends the run. Directories that a crash left
    half-written are never read, do not stop later saves, and go with the next one. Of several processes each writes its
    own part, and all call the same methods.
    """

    def __init__(self, directory: str | Path, *, keep: int = 1):
        self.directory = epath.Path(Path(directory).expanduser().resolve())
        self.keep = keep
        self._writing: tuple[int, int | None, ocp.AsyncResponse[None]] | None = None

    def steps(self) -> list[int]:
        """Steps with a directory of their own, readable or not, ascending; temporary directories have other names."""
        if not self.directory.is_dir():
            return []
        return sorted(int(found.name) for found in self.directory.iterdir() if found.name.isdecimal())

    def save(self, state: TrainState, host: dict[str, Any], *, best_step: int | None = None) -> int:
        """Begins to write the state under its own step. The step is there, and what is neither among the newest nor the
        best is gone, once `wait` returns. Raises SaveError, also for the save before."""
        self.wait()
        step = int(state.step)
        with self._failing(step):
            # First, so that a place which cannot be written fails here: orbax's threads would wait minutes for it.
            self.directory.mkdir(parents=True, exist_ok=True)
            # Written beside its place and renamed at the end.
            path, notes = self.directory / str(step), {HOST: json.dumps(host)}
            self._writing = (
                step,
                best_step,
                ocp.save_async(path, state._asdict(), overwrite=True, custom_metadata=notes),
            )
        return step

    def wait(self, timeout: float | None = None) -> None:
        """Returns when nothing is being written. Raises SaveError if that failed, or takes longer than `timeout`
        seconds. No collective of the devices: a process may call it while others train."""
        if self._writing is None:
            return
        step, best_step, response = self._writing
        self._writing = None
        with self._failing(step):
            response.result(timeout)  # once all have written
        if is_main():
            try:
                self._clear(step, best_step)
            except OSError as error:
                log.warning("old checkpoints in %s stay for now: %s", self.directory, error)

    def _clear(self, step: int, best_step: int | None) -> None:
        # Steps past this one belong to a run that was given up, or cannot be read.
        kept = {*[s for s in self.steps() if s <= step][-self.keep :], best_step}
        for old in set(self.steps()) - kept:
            (self.directory / str(old)).rmtree()
        for found in self.directory.iterdir():  # nothing is being written: a crash left it
            if TEMPORARY in found.name:
                found.rmtree()

    @contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            good = [s for s in self.steps() if s < step]
            raise SaveError(
                f"writing the checkpoint of step {step} to {self.directory} failed: {error}. "
                + (f"The newest good one is step {good[-1]}; " if good else "There is no earlier one; ")
                + "free the disk or choose another output.directory, and run the same command again"
            ) from error

    def restore_params(self, like: TrainState, step: int | None = None) -> Restored:
        """The parameters alone, of the newest readable step or the one asked for. Raises RuntimeError as `restore`."""
        nothing = jax.tree.map(lambda _: ocp.PLACEHOLDER, like)._replace(params=abstract(like).params)
        found, host, at = self._newest(nothing._asdict(), step)
        return Restored(found["params"], at, host)

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]] | None:
        """(state, host notes) of the newest readable step, or of the one asked for; None if there is none at all.

        `like` is a state, or `abstract` of one, which leaves room for what is read.
        A step that cannot be read is skipped with a warning that names it. If there are steps and none can be read,
        or not the one asked for, RuntimeError lists why: starting anew would overwrite them.
        """
        self.wait()
        if step is None and not agree(self.steps()):
            return None
        found, host, _ = self._newest(abstract(like)._asdict(), step)
        return TrainState(**found), host

    def _newest(self, wanted: Any, step: int | None) -> tuple[Any, dict[str, Any], int]:
        there = agree(self.steps()[::-1])
        if step is not None and step not in there:
            known = ", ".join(map(str, there[::-1])) or "none"
            raise RuntimeError(
                f"no checkpoint of step {step} in {self.directory}; there are: {known}. output.export=last, or no "
                "--step, takes the newest"
            )
        candidates = there if step is None else [step]
        failures = []
        for candidate in candidates:
            path, reason = self.directory / str(candidate), ""
            try:
                found = ocp.load(path, wanted)
                host = json.loads(ocp.metadata(path).custom_metadata[HOST])
            except Exception as error:  # orbax raises many types for missing and truncated files
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if not any_process(bool(reason)):  # all go on from the same step, or none from this one
                return found, host, candidate
            reason = reason or "another process cannot read it"
            failures.append(f"step {candidate}: {reason}")
            log.warning("checkpoint of step %d in %s is unreadable and skipped: %s", candidate, self.directory, reason)
        what, way_out = "no checkpoint", "choose another output.directory, or delete this one to start anew"
        if step is not None:
            what, way_out = "not the checkpoint asked for", "output.export=last, or no --step, takes the newest"
        raise RuntimeError(f"{what} in {self.directory} can be read:\n  " + "\n  ".join(failures) + f"\n{way_out}")


def abstract(state: TrainState) -> TrainState:
    """Its shapes, dtypes and shardings, without its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
