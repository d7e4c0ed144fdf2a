"""Loss curves of the tiny model: what may be chosen for speed or memory changes them within the stated bounds."""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from marsjax.parallel.sharding import make_mesh
from marsjax.training import setup
from marsjax.training.config import OptimizerSection
from marsjax.training.config_text import load_config
from marsjax.training.objectives import Forward, mars
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import new_state
from marsjax.training.step import Objective, batch_sharding, make_train_step, place_batch

MESH = make_mesh(fsdp=1)
STEPS, DOCUMENTS, LENGTH, BLOCK = 24, 8, 12, 4
KEEP_ALL = Forward()
PLAIN = OptimizerSection(learning_rate=3e-3, warmup=2, clip_norm=1.0)


def documents(step):
    """Eight documents; token t + 1 follows from token t, so that there is something to learn."""
    rng = np.random.default_rng(zlib.crc32(b"curves") + step)
    found = []
    for _ in range(DOCUMENTS):
        size = int(rng.integers(7, LENGTH + 1))
        ids = (int(rng.integers(0, 58)) + 7 * np.arange(size)) % 58 + 2
        found.append((ids, int(rng.integers(1, 4))))
    return found


@pytest.fixture(scope="module")
def curve(tiny, make):
    """options → losses [STEPS] float64 and gradient norms; `packed`: rows of two documents instead of one."""

    def run(*, forward=KEEP_ALL, optimizer=PLAIN, accumulation=1, packed=False):
        def loss(model, batch, noisy_length):
            return mars(model, batch, block_size=BLOCK, noisy_length=noisy_length, forward=forward)

        schedule = make_schedule(optimizer, STEPS)
        made = make_optimizer(optimizer, schedule)
        step = make_train_step(tiny.config, Objective(loss), made, schedule, mesh=MESH)
        # A copy, for steps donate; on the mesh, or the second step would be another program.
        params = jax.device_put(jax.tree.map(jnp.array, tiny.params), NamedSharding(MESH, PartitionSpec()))
        state = new_state(tiny.build(params), made, 0, MESH)
        found = []
        for i in range(STEPS):
            content = documents(i)
            rows = [content[2 * r : 2 * r + 2] for r in range(DOCUMENTS // 2)] if packed else [[d] for d in content]
            batch = make.batch(rows, length=2 * LENGTH if packed else LENGTH, block_size=BLOCK)
            rows_each = len(rows) // accumulation
            placed = place_batch(batch, accumulation, rows_each, batch_sharding(MESH, rows_each))
            with jax.set_mesh(MESH):
                state, metrics = step(state, placed, None)
            found.append((metrics["loss"], metrics["gradient_norm"]))
        return np.array(found, np.float64).T

    return run


@pytest.fixture(scope="module")
def plain(curve):
    losses, norms = curve()
    assert losses[-1] < 0.75 * losses[0], "nothing was learned, so nothing is compared"
    return losses, norms


# The same sums in another order, in float32: roundings grow over the steps, to a few in a million here.
SAME = {
    "nothing_saveable": {"forward": Forward(remat="nothing_saveable")},
    "dots_saveable": {"forward": Forward(remat="dots_saveable")},
    "accumulation": {"accumulation": 8},
    "packed": {"packed": True},
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_curve(curve, plain, name):
    for got, want in zip(curve(**SAME[name]), plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=5e-5)


# What rounds on purpose stays within this of the float32 curve, a step's loss relative to it (found: a third at most).
NEAR = {
    "bfloat16": ({"forward": Forward(dtype=jnp.bfloat16)}, 0.003),
    "moments=bfloat16": ({"optimizer": dataclasses.replace(PLAIN, moments="bfloat16")}, 0.004),
    "moments=factored": ({"optimizer": dataclasses.replace(PLAIN, moments="factored")}, 0.03),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_curve(curve, plain, name):
    options, bound = NEAR[name]
    losses, _ = curve(**options)
    assert (losses != plain[0]).any()  # the choice reached the program
    np.testing.assert_allclose(losses, plain[0], rtol=bound)


@pytest.mark.parametrize(
    ("platform", "unroll", "chosen"),
    [("cpu", False, "dots_with_no_batch_dims_saveable"), ("cpu", True, None), ("tpu", False, None)],
)
def test_auto_remat(platform, unroll, chosen):
    given = ["model.source=m", "data.train=jsonl:d", "output.directory=o", "optimizer.steps=1"]
    config = load_config(None, [*given, f"compute.unroll_layers={str(unroll).lower()}"])
    assert setup.make_forward(config, platform).remat == chosen
