"""Kill -9 at random moments of a run of two processes, a third of them inside a save; then the end is compared.

    python benchmarks/kill_soak.py [--kills 10] [--seed 0]

The run goes on after every kill by the same command. Parameters, moments, PRNG key, the data's position and every
step's rows must equal, bitwise, those of a run that nothing broke. Prints a table; the exit code says whether all held.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("processes", ROOT / "tests" / "parallel" / "test_processes.py")
processes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(processes)
processes.STEPS = 60  # some seconds of steps: most of a run is its start


def start(place, name: str) -> subprocess.Popen:
    asked = {"rows": str(place.directory / f"{name}.rows.{{}}")}
    worker = [sys.executable, str(processes.WORKER), json.dumps(asked), str(place.directory / "config.yaml")]
    overrides = [f"output.directory={place.directory / name}", f"optimizer.steps={processes.STEPS}"]
    overrides += ["evaluation.every=20", "output.export=none"]
    launch = [sys.executable, "launch/local.py", "--grace", "1", "--", *worker, *overrides]
    log = (place.directory / f"{name}.log").open("a")
    return subprocess.Popen(launch, env=place.env, cwd=ROOT, stdout=log, stderr=log)


def children(process: subprocess.Popen) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found]


def half_written(checkpoints: Path) -> dict[int, str]:
    """{inode: step} of directories that are not whole yet."""
    found = {}
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if not path.name.isdecimal():
                found[path.stat().st_ino] = path.name.partition(".")[0]
    return found


def steps_begun(place, name: str) -> list[int]:
    path = place.directory / f"{name}.rows.0"
    return [json.loads(x)["step"] for x in path.read_text().splitlines()] if path.exists() else []


def kill(place, name: str, number: int, chance: random.Random) -> dict:
    """Starts the run and kills one process, or both, at a random moment; what was there then."""
    checkpoints, before = place.directory / name / "checkpoints", len(steps_begun(place, name))
    left = half_written(checkpoints)
    run, begun = start(place, name), time.monotonic()
    when = ("in a save", "in training", "at any time")[number % 3]

    def until(condition) -> None:
        while not condition() and run.poll() is None:
            time.sleep(0.001)

    if when == "at any time":  # from the start of the processes on
        time.sleep(chance.uniform(1, 25))
    else:
        steps = chance.randint(2, 10)
        until(lambda: len(steps_begun(place, name)) >= before + steps)
        if when == "in a save":
            until(lambda: set(half_written(checkpoints)) - set(left))
        time.sleep(chance.uniform(0, 0.03))
    pids = children(run) if run.poll() is None else []
    victims = pids if chance.random() < 0.5 else [chance.choice(pids)] if pids else []
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    after, half = time.monotonic() - begun, {s for inode, s in half_written(checkpoints).items() if inode not in left}
    code = run.wait()
    saved = sorted(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal()) if checkpoints.is_dir() else []
    made = steps_begun(place, name)[before:]
    return {
        "kill": number + 1,
        "when": when,
        "after (s)": f"{after:.1f}",
        "killed": "both" if len(victims) == 2 else f"process {pids.index(victims[0])}" if victims else "none",
        "began with step": made[0] if made else "-",
        "was at step": made[-1] if made else "-",
        "half written": " ".join(half) or "-",
        "saved": " ".join(map(str, saved)) or "-",
        "exit code": code,
    }


def differences(place, name: str) -> list[str]:
    found = []
    (want, position), (got, here) = place.state("unbroken"), place.state(name)
    if here != position:
        found.append(f"the data's position: {here}, not {position}")
    found += [path for path, value in want.items() if not np.array_equal(got[path], value)]
    for process in range(2):
        straight = dict(place.rows("unbroken", process))
        rows = place.rows(name, process)
        found += [f"rows of step {step}, process {process}" for step, some in rows if some != straight[step]]
        if missing := set(straight) - {step for step, _ in rows}:
            found.append(f"process {process} never made steps {sorted(missing)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        place = processes.Place(Path(directory))
        if start(place, "unbroken").wait():
            print((place.directory / "unbroken.log").read_text(), file=sys.stderr)
            return 1
        table = []
        for number in range(options.kills):
            table.append(kill(place, "killed", number, chance))
            if number == 0:
                print("| " + " | ".join(table[0]) + " |\n" + "|---" * len(table[0]) + "|")
            print("| " + " | ".join(map(str, table[-1].values())) + " |", flush=True)
            if table[-1]["exit code"] not in (0, 128 + signal.SIGKILL):
                print((place.directory / "killed.log").read_text()[-4000:], file=sys.stderr)
                return 1
        code = start(place, "killed").wait()
        if code:
            print((place.directory / "killed.log").read_text()[-4000:], file=sys.stderr)
            return 1
        wrong = differences(place, "killed")
        arrays, steps = len(place.state("killed")[0]), len(place.rows("killed", 0))
    killed = sum(row["killed"] != "none" for row in table)
    print(f"\n{killed} kills, {sum(row['half written'] != '-' for row in table)} of them inside a save; "
          f"{steps} steps were made for {processes.STEPS}; {arrays} arrays, position and rows bitwise equal: "
          f"{'no' if wrong else 'yes'}")  # fmt: skip
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
