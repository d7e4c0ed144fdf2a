"""`marsjax train`, watched: python train_worker.py {"rows": FILE, ...} CONFIG [overrides]

The first argument says what to do beside training; it may be {}.

    rows    file that gets {"step", "rows": {row of the global batch: checksum}} a line, of this process's own rows;
            "{}" in its name stands for the process's id
    writes  file that gets the path of every file which Python opens for writing, likewise
    signal  [process, step, number]: this process sends itself a signal while that step is made
    die     [process, step]: it is killed (SIGKILL) while the checkpoint of that step is half written
    broken  [process, step, what]: "write" or "_evaluate" of the run fails there, with an input/output error
    full    [process, step]: its writer finds the disk full when that step's checkpoint is written
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from zlib import crc32

import numpy as np

from marsjax.training import checkpoints, loop
from marsjax.training.step import local_rows

asked = json.loads(sys.argv[1])
me = int(os.environ.get("MARSJAX_PROCESS_ID", 0))
advance, save = loop._Run._advance, checkpoints.Checkpoints.save
place_batch, save_async = loop.place_batch, checkpoints.ocp.save_async
at = {"step": 0}
written: list[str] = []


def of_me(name: str, step: int) -> bool:
    return asked.get(name, [None, None])[:2] == [me, step]


def note_writes(event, arguments):
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, mode, flags = arguments
        if (mode and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
            written.append(os.fsdecode(path))


def watched_advance(self, clock):
    at["step"] = step = int(self.state.step) + 1
    if of_me("signal", step):
        os.kill(os.getpid(), asked["signal"][2])
    return advance(self, clock)


def watched_place(batch, accumulation, rows, sharding):
    if "rows" in asked:
        numbers = local_rows(sharding, accumulation, rows)
        assert len(numbers) == len(batch.tokens)
        sums = {n: crc32(b"".join(np.asarray(x[i]).tobytes() for x in batch)) for i, n in enumerate(numbers)}
        with open(asked["rows"].format(me), "a") as file:
            file.write(json.dumps({"step": at["step"], "rows": sums}) + "\n")
    return place_batch(batch, accumulation, rows, sharding)


def watched_save(self, state, host, **options):
    step = int(state.step)
    result = save(self, state, host, **options)
    if of_me("die", step):
        while not [p for p in self.directory.iterdir() if not p.name.isdecimal()]:  # the temporary directory
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def watched_save_async(path, *args, **options):
    if of_me("full", int(path.name)):
        raise OSError(28, "No space left on device")
    return save_async(path, *args, **options)


def breaking(name):
    method = getattr(loop._Run, name)

    def broken(self, step, *args):
        if asked.get("broken") == [me, step, name]:
            raise OSError(5, "Input/output error")
        return method(self, step, *args)

    return broken


for name in ("write", "_evaluate"):
    setattr(loop._Run, name, breaking(name))
loop._Run._advance, loop.place_batch = watched_advance, watched_place
checkpoints.Checkpoints.save, checkpoints.ocp.save_async = watched_save, watched_save_async

if __name__ == "__main__":
    from marsjax.cli import main

    sys.addaudithook(note_writes)
    code = main(["train", *sys.argv[2:]])
    if "writes" in asked:
        Path(asked["writes"].format(me)).write_text("\n".join(written))
    sys.exit(code)
