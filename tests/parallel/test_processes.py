"""`marsjax train` in two processes of four devices: equal to one process on one device, and to itself after crashes."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("train_worker.py")
CONFIG = """
model:
  init: {family: qwen2, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2,
         head_dim: 8}
  tokenizer: demo
data: {train: "problems:train,count=200", length: 112, packing: true, row_length: 224, batch_size: 8}
optimizer: {steps: 6, learning_rate: 1.0e-3, warmup: 2, eps: 1.0e-6}
parallel: {data: -1, fsdp: 2, tensor: 2}
evaluation: {data: "problems:validation,count=9", rows: 5, every: 3}
checkpoint: {every: 2}
output: {log_every: 1, tensorboard: false}
"""
STEPS = 6


class Place:
    """Where runs are made: their configuration, compiled programs, and the rows that their processes saw."""

    def __init__(self, directory: Path):
        self.directory = directory
        part = directory / f"config.yaml.{os.getpid()}"
        part.write_text(CONFIG)
        part.replace(directory / "config.yaml")
        self.env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }

    def run(
        self, name: str, *overrides: str, processes: int = 2, devices: int = 4, **asked
    ) -> subprocess.CompletedProcess:
        """Goes on with run `name`; see train_worker.py for what can be asked."""
        asked["rows"] = str(self.directory / f"{name}.rows.{{}}")
        asked["writes"] = str(self.directory / f"{name}.writes.{{}}")
        command = [str(WORKER), json.dumps(asked), str(self.directory / "config.yaml")]
        launch = ["launch/local.py", "--processes", str(processes), "--devices", str(devices), "--grace", "2", "--"]
        return subprocess.run(
            [
                sys.executable,
                *launch,
                sys.executable,
                *command,
                f"output.directory={self.directory / name}",
                *overrides,
            ],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def log(self, name: str, what: str, process: int) -> list[str]:
        return (self.directory / f"{name}.{what}.{process}").read_text().splitlines()

    def rows(self, name: str, process: int) -> list[tuple[int, dict[int, int]]]:
        """[(step, {row of the batch: checksum})] in the order in which they were made."""
        lines = map(json.loads, self.log(name, "rows", process))
        return [(line["step"], {int(row): sum_ for row, sum_ in line["rows"].items()}) for line in lines]

    def metrics(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.directory / name / "metrics.jsonl").read_text().splitlines()]

    def state(self, name: str) -> tuple[dict, dict]:
        """(arrays by path, the data's position) of the newest checkpoint."""
        newest = max((p for p in (self.directory / name / "checkpoints").iterdir()), key=lambda p: int(p.name))
        assert newest.name == str(STEPS)
        loaded = jax.tree.map(
            lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            ocp.load(newest, placed(newest)),
        )
        flat = jax.tree_util.tree_flatten_with_path(loaded)[0]
        host = json.loads(ocp.metadata(newest).custom_metadata["host"])
        return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}, host["data"]


def placed(checkpoint: Path):
    """Its shapes, all on the one device that is here."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = ocp.metadata(checkpoint).metadata
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One for all workers, where tests are spread over several: runs are made once."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processes"
    directory.mkdir(exist_ok=True)
    return Place(directory)


def once(place, name, make) -> str:
    """What run `name` printed, made by whoever comes first."""
    done = place.directory / f"{name}.done"
    with (place.directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            done.write_text(make().stdout)
    return done.read_text()


def made(place, name, *overrides, code=0, **options):
    done = place.run(name, *overrides, **options)
    assert done.returncode == code, done.stdout[-3000:]
    return done


@pytest.fixture(scope="module")
def unbroken(place):
    return once(place, "unbroken", lambda: made(place, "unbroken"))


@pytest.fixture(scope="module")
def alone(place):
    mesh = ("parallel.fsdp=1", "parallel.tensor=1")
    return once(place, "alone", lambda: made(place, "alone", *mesh, processes=1, devices=1))


@pytest.fixture(scope="module")
def stopped(place, unbroken):
    """A run whose process 1 alone got SIGTERM, while step 2 was made; and a copy of it."""

    def make():
        done = made(place, "stopped", code=130, signal=[1, 2, 15])
        shutil.copytree(place.directory / "stopped", place.directory / "halved")
        for process in range(2):  # the rows up to there, since others go on with the run
            shutil.copy(place.directory / f"stopped.rows.{process}", place.directory / f"until.rows.{process}")
        return done

    return once(place, "stopped", make)


def assert_same_end(place, name, *, exact=True):
    """The newest state is that of the unbroken run, and every step stands in the metrics once."""
    (want, position), (got, here) = place.state("unbroken"), place.state(name)
    assert here == position
    assert list(got) == list(want)
    for path, value in want.items():
        if exact:
            assert np.array_equal(got[path], value), path
        else:
            np.testing.assert_allclose(got[path], value, rtol=1e-4, atol=1e-5, err_msg=path)
    assert [x["step"] for x in place.metrics(name) if x["kind"] == "train"] == [*range(1, STEPS + 1)]


def assert_same_rows(place, name):
    """Each process saw the unbroken run's rows, step by step, going back to a saved step where it was killed."""
    for process in range(2):
        straight, seen = dict(place.rows("unbroken", process)), place.rows(name, process)
        assert all(rows == straight[step] for step, rows in seen)
        steps = [0, *(step for step, _ in seen)]
        assert all(after == before + 1 or (after - 1) in (0, 2, 3, 4) for before, after in itertools.pairwise(steps))
        assert steps[-1] == STEPS


def test_equal_to_one_process_on_one_device(place, unbroken, alone):
    one, two = place.metrics("alone"), place.metrics("unbroken")
    assert [(x["step"], x["kind"]) for x in one] == [(x["step"], x["kind"]) for x in two]
    for a, b in zip(one, two, strict=True):
        assert set(a) == set(b)
        for key in set(a) - {"kind", "mask_offsets", "ar", "tokens_per_second"}:
            np.testing.assert_allclose(b[key], a[key], rtol=1e-5, err_msg=f"{key} at step {a['step']}")
    exports = [load_file(place.directory / name / "export" / "model.safetensors") for name in ("alone", "unbroken")]
    assert set(exports[0]) == set(exports[1])
    for name, value in exports[0].items():
        np.testing.assert_allclose(exports[1][name], value, rtol=0, atol=1e-3 * 1e-3 * STEPS, err_msg=name)


def test_each_process_makes_rows_of_its_own_that_are_together_the_batch(place, unbroken, alone):
    """Which does not depend on the number of processes."""
    first, second, whole = place.rows("unbroken", 0), place.rows("unbroken", 1), place.rows("alone", 0)
    assert [step for step, _ in whole] == [*range(1, STEPS + 1)]
    for (_, mine), (_, others), (_, all_) in zip(first, second, whole, strict=True):
        assert len(mine) == len(others) == 4
        assert not set(mine) & set(others)
        assert mine | others == all_


def test_only_process_0_writes_and_prints(place, unbroken):
    said = [line for line in unbroken.splitlines() if "step" in line and "spmd_partitioner" not in line]
    assert len([line for line in said if line.startswith("[process 0] step ")]) == STEPS
    assert not [line for line in said if line.startswith("[process 1]")]
    base = f"{place.directory / 'unbroken'}/"
    first, second = (
        {path.removeprefix(base) for path in place.log("unbroken", "writes", process) if path.startswith(base)}
        for process in range(2)
    )
    assert {"metrics.jsonl", "config.yaml.part"} <= first
    assert not [path for path in second if not path.startswith(("checkpoints/", ".probe-"))]


def test_killed_also_inside_a_save(place, unbroken):
    for asked in ({"die": [1, 4]}, {"signal": [0, 5, 9]}):
        killed = place.run("killed", **asked)
        assert killed.returncode == 128 + 9, killed.stdout[-3000:]
    done = place.run("killed")
    assert done.returncode == 0, done.stdout[-3000:]
    assert_same_end(place, "killed")
    assert_same_rows(place, "killed")
    assert [p.name for p in (place.directory / "killed" / "checkpoints").iterdir()] == [str(STEPS)]  # no rubbish stays


def test_sigterm_to_one_stops_both_behind_the_same_saved_step(place, stopped):
    assert "stopped and saved at step 3; the same command goes on from there" in stopped
    assert [[step for step, _ in place.rows("until", process)] for process in range(2)] == [[1, 2, 3]] * 2
    done = place.run("stopped")
    assert "resumed at step 3 of 6" in done.stdout
    assert_same_end(place, "stopped")
    assert_same_rows(place, "stopped")


def test_resumed_on_half_the_devices_sees_each_remaining_row_once(place, unbroken, stopped):
    done = place.run("halved", processes=1)
    assert done.returncode == 0, done.stdout[-3000:]
    first, second = (dict(place.rows("unbroken", process)) for process in range(2))
    assert place.rows("halved", 0) == [(step, first[step] | second[step]) for step in (4, 5, 6)]
    assert_same_end(place, "halved", exact=False)


@pytest.mark.parametrize("where", [[0, 5, "write"], [1, 3, "_evaluate"]], ids=["metrics", "evaluation"])
def test_an_error_of_one_process_ends_both_and_says_so(place, where):
    """While the other trains on, and a checkpoint is being written."""
    said = place.run(f"broken {where[2]}", broken=where)
    assert said.returncode == 42  # a new start may mend it
    assert f"process {where[0]} ends: OSError(5, 'Input/output error')" in said.stderr + said.stdout


def test_a_full_disk_of_one_process_ends_both_and_says_so(place):
    mesh = ("parallel.data=1", "parallel.fsdp=-1", "parallel.tensor=1")  # what a configuration without the section has
    done = place.run("full", *mesh, full=[0, 4])
    assert done.returncode == 1
    assert "[process 0] marsjax: writing the checkpoint of step 4" in done.stdout
    assert "No space left on device. The newest good one is step 3; free the disk" in done.stdout


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "output.directory={}/$MARSJAX_PROCESS_ID",
            "one configuration: process 1 has output.directory={0}/1, not {0}/0",
        ),
        ("data.train=jsonl:rows.jsonl", "must read the same data: process 1 has rows 1, not 2, fingerprint "),
        ("output.directory=run", "run must be on a mount that all processes share: process 1 has another directory of"),
    ],
)
def test_processes_that_do_not_belong_together(place, tmp_path, override, said):
    """Each runs in a directory of its own, as on hosts that share nothing."""
    ask = {"role": "user", "content": "Hi"}
    for process in range(2):
        (tmp_path / str(process)).mkdir()
        row = json.dumps({"messages": [ask, {"role": "assistant", "content": "Ho"}]}) + "\n"
        (tmp_path / str(process) / "rows.jsonl").write_text(row * (2 - process))
    words = [sys.executable, "-m", "marsjax.cli", "train", str(place.directory / "config.yaml"), "data.batch_size=4"]
    words += ["data.packing=false", "data.row_length=null"]
    words += [f"output.directory={tmp_path}/run"] * override.startswith("data") + [override.format(tmp_path)]
    here = f"cd {tmp_path}/$MARSJAX_PROCESS_ID && exec {' '.join(words)}"
    launch = [sys.executable, str(ROOT / "launch" / "local.py"), "--grace", "5", "--", "bash", "-c", here]
    done = subprocess.run(launch, env=place.env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert said.format(tmp_path) in done.stdout
    assert "step 1/" not in done.stdout
