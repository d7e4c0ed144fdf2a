"""Training over eight devices, under every kind of mesh, against one: losses, gradients and parameters."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).with_name("mesh_worker.py")
PARTS = {  # into how many the most divided weight is cut
    "mars, data=8": 1,
    "mars, fsdp=8": 8,
    "mars, data=2 fsdp=2 tensor=2": 4,
    "mars, slice=2 fsdp=4": 4,
    "mars, fsdp=4 tensor=2, accumulation 2": 8,
    "mars, splash": 4,
    "sft, data=2 fsdp=2 tensor=2": 4,
    "block_diffusion, data=2 fsdp=2 tensor=2": 4,
    "mtp, data=2 fsdp=2 tensor=2, accumulation 2": 2,
    "mtp, splash": 2,
}
LEARNING_RATE = 1e-3


@pytest.fixture
def runs(tmp_path):
    """{run: {(kind, step, name): array}}"""
    path = tmp_path / "runs.npz"
    done = subprocess.run(
        [sys.executable, WORKER, path], env=dict(os.environ), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict] = {}
    with np.load(path) as file:
        for key in file.files:
            name, kind, step, what = key.split("|")
            found.setdefault(name, {})[kind, int(step), what] = file[key].astype(np.float64)
    return found


def test_equal_to_one_device(runs):
    """One test, so that runs are made once where tests are spread over workers."""
    for name in PARTS:
        assert_equal(name, runs[name], runs[f"{name.partition(',')[0]}, one device"])


def assert_equal(name, got, want):
    assert got.pop(("parts", 0, "most")) == PARTS[name]
    steps = 1 + max(step for _, step, _ in got)
    assert {key for key in want if key[1] < steps and key[0] in ("metric", "gradient")} <= set(got)
    gradients = 0
    for (kind, step, what), value in got.items():
        where = f"{name}: {what}, step {step}"
        if kind == "metric":
            np.testing.assert_allclose(value, want[kind, step, what], rtol=1e-5, err_msg=where)
        elif kind == "gradient":
            expected = want[kind, step, what]
            assert np.abs(expected).max() > 0, where
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=where)
            gradients += 1
        elif (kind, step, what) in want:  # a run of fewer steps has no like
            np.testing.assert_allclose(
                value, want[kind, step, what], atol=1e-3 * LEARNING_RATE * steps, rtol=0, err_msg=where
            )
    assert gradients == sum(kind == "gradient" and step < steps for kind, step, _ in want)
