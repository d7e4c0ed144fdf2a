"""The optimiser step against numpy, accumulation, batches without supervision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.models.adapters import attach
from marsjax.models.config import AdapterConfig
from marsjax.parallel.sharding import make_mesh
from marsjax.training.config import OptimizerSection
from marsjax.training.objectives import mars
from marsjax.training.optimizer import decays, make_optimizer, make_schedule
from marsjax.training.state import TrainState, new_state
from marsjax.training.step import Objective, batch_sharding, make_train_step, place_batch

MESH = make_mesh(fsdp=1)


def place(batch, accumulation):
    rows = len(batch.tokens) // accumulation
    return place_batch(batch, accumulation, rows, batch_sharding(MESH, rows))


def loss(model, batch, noisy_length):
    return mars(model, batch, block_size=4, noisy_length=noisy_length)


def fresh(tiny, optimizer) -> TrainState:
    params = jax.tree.map(jnp.array, tiny.params)  # a copy: steps donate
    return new_state(tiny.build(params), optimizer, 0, MESH)


@pytest.fixture(scope="module")
def trainer(tiny):
    section = OptimizerSection(learning_rate=3e-3, warmup=2, weight_decay=0.1, clip_norm=0.5, b2=0.99)
    schedule = make_schedule(section, 6)
    optimizer = make_optimizer(section, schedule)
    return section, optimizer, make_train_step(tiny.config, Objective(loss), optimizer, schedule, mesh=MESH)


def learning_rate(section, steps, warmup, i):
    if i < warmup:
        return section.learning_rate * (i + 1) / warmup
    share = (i - warmup) / (steps - warmup)
    return section.learning_rate * (
        section.final_fraction + (1 - section.final_fraction) * (1 + np.cos(np.pi * share)) / 2
    )


@pytest.mark.parametrize(("warmup", "updates"), [(0.0, 0), (3, 3), (0.25, 5), (1, 1)])
def test_schedule(warmup, updates):
    section = OptimizerSection(learning_rate=2e-4, warmup=warmup, final_fraction=0.1)
    schedule = make_schedule(section, 20)
    for i in range(20):
        np.testing.assert_allclose(schedule(i), learning_rate(section, 20, updates, i), rtol=1e-5)


def test_three_steps_equal_numpy(tiny, make, trainer):
    section, optimizer, step = trainer
    batch = make.batch([make.documents(seed, [9 + seed % 4]) for seed in range(1, 5)], length=12, block_size=4)
    state = fresh(tiny, optimizer)
    gradient = jax.jit(jax.grad(lambda p: loss(tiny.build(p), batch, None).numerator / batch.denominator.sum()))

    flat, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), tiny.params))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(tiny.params)[0]]
    mean, square = ([np.zeros_like(x) for x in flat] for _ in range(2))
    for i in range(3):
        g = [
            np.asarray(x, np.float64)
            for x in jax.tree.leaves(gradient(jax.tree.map(jnp.float32, tree.unflatten(flat))))
        ]
        norm = np.sqrt(sum((x**2).sum() for x in g))
        assert norm > section.clip_norm  # clipping is at work
        rate = learning_rate(section, 6, 2, i)
        for j, x in enumerate(g):
            x = x * section.clip_norm / norm
            mean[j] = section.b1 * mean[j] + (1 - section.b1) * x
            square[j] = section.b2 * square[j] + (1 - section.b2) * x**2
            corrected = mean[j] / (1 - section.b1 ** (i + 1))
            update = corrected / (np.sqrt(square[j] / (1 - section.b2 ** (i + 1))) + section.eps)
            decay = section.weight_decay if paths[j].endswith("['kernel']") else 0
            flat[j] = flat[j] - rate * (update + decay * flat[j])
        state, metrics = step(state, place(batch, 1), None)
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
        np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
    assert int(state.step) == 3
    # Adam divides by the root of tiny squares where gradients are near 0; a per mille of one update is allowed.
    for path, want, got in zip(paths, flat, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5, err_msg=path)


def test_what_decays(tiny):
    adapter = AdapterConfig(rank=2, alpha=4.0, masks=2, sampler=True)
    model = attach(tiny.build(jax.tree.map(jnp.array, tiny.params)), adapter)
    flat = jax.tree_util.tree_flatten_with_path(decays(nnx.to_pure_dict(nnx.state(model))))[0]
    assert {path[-1].key: value for path, value in flat} == {
        "kernel": True, "a": True, "b": True, "bias": False, "scale": False, "embedding": False,
    }  # fmt: skip


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_accumulation_changes_nothing(tiny, make, trainer, normalisation):
    _, optimizer, step = trainer
    rows = [make.documents(seed, [5 + 2 * seed]) for seed in range(4)]  # counts differ: a mean of means would be wrong
    batch = make.batch(rows, length=12, block_size=4, normalisation=normalisation)
    states, metrics = zip(*(step(fresh(tiny, optimizer), place(batch, a), None) for a in (1, 4)), strict=True)
    for name in ("loss", "loss_ar", "loss_mask", "gradient_norm", "supervised", "tokens"):
        np.testing.assert_allclose(metrics[1][name], metrics[0][name], rtol=1e-5, err_msg=name)
    moments = [jax.tree.leaves(s.opt_state) for s in states]
    for a, b in zip(*moments, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-6)


def test_nothing_supervised_moves_nothing(tiny, make, trainer):
    _, optimizer, step = trainer
    batch = make.batch([[(np.arange(2, 12), 10)], [(np.arange(2, 9), 7)], [], []], length=12, block_size=4)
    state, metrics = step(fresh(tiny, optimizer), place(batch, 4), None)
    assert metrics["loss"] == 0
    assert metrics["gradient_norm"] == 0
    for path, moment in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]:
        assert np.ndim(moment) == 0 or not np.any(moment), path


def test_state_needs_stacked_layers(tiny):
    optimizer = make_optimizer(OptimizerSection(), make_schedule(OptimizerSection(), 2))
    with pytest.raises(ValueError, match="stacked"):
        new_state(tiny.build(tiny.params, unroll=True), optimizer, 0, MESH)


def test_rebuild_is_the_inverse_of_pure_dict(tiny):
    for unroll in (False, True):
        again = nnx.to_pure_dict(nnx.state(tiny.build(tiny.params, unroll=unroll)))
        layers = again["layers"]
        if unroll:
            layers = jax.tree.map(lambda *x: jnp.stack(x), *(layers[i] for i in range(tiny.config.num_layers)))
        for a, b in zip(jax.tree.leaves(tiny.params["layers"]), jax.tree.leaves(layers), strict=True):
            assert np.array_equal(a, b)
