"""Whole runs of a two-layer model on the project's own problems."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.pipeline import load_rows
from marsjax.training import ConfigError, TrainingDiverged, load_config, loop, train
from marsjax.training.checkpoints import Checkpoints
from marsjax.training.stopping import StopAsked
from marsjax.weights import load

INIT = (
    "{family: qwen2, hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 8}"
)


def config(directory, *overrides):
    return load_config(None, [
        f"model.init={INIT}", "model.tokenizer=demo", "data.train=problems:train,count=64", "data.length=96",
        "data.batch_size=4", "data.accumulation=2", "optimizer.steps=6", "optimizer.learning_rate=1e-3",
        "optimizer.warmup=2", "evaluation.data=problems:validation,count=9", "evaluation.rows=5", "evaluation.every=3",
        "checkpoint.every=3", "output.log_every=1", "output.tensorboard=false",
        f"output.directory={directory}", *overrides,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps, with what each step was given."""
    directory = tmp_path_factory.mktemp("runs") / "straight run"
    result, rows = _record(config(directory, "output.tensorboard=true", "evaluation.decode_prompts=2",
                                  "evaluation.max_new_tokens=4"))  # fmt: skip
    return result, rows


def _record(settings):
    rows = []
    advance = loop.place_batch
    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "place_batch", lambda batch, *a: (rows.append(batch.tokens.copy()), advance(batch, *a))[1])
    try:
        return train(settings), rows
    finally:
        patch.undo()


def _final_state(directory):
    checkpoints = Checkpoints(directory / "checkpoints")
    tree = ocp.load(checkpoints.directory / str(checkpoints.steps()[-1]))
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


def test_a_run_leaves_what_it_promises(straight):
    result, rows = straight
    assert result.steps == 6
    assert len(rows) == 6
    assert result.best["step"] in (3, 6)
    assert {"loss", "loss_ar", "loss_mask", "mask_offsets", "ar", "tokens_per_forward"} <= set(result.final)
    assert 1 <= result.final["tokens_per_forward"] <= 4
    evaluated = load_rows("problems:validation,count=5", demo_tokenizer(), length=96)
    assert result.final["ar"]["count"] == evaluated.stats.supervised_tokens
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [x["step"] for x in lines if x["kind"] == "eval"] == [3, 6]
    train_lines = [x for x in lines if x["kind"] == "train"]
    assert train_lines[-1]["loss"] < train_lines[0]["loss"]
    assert all(np.isclose(x["loss"], x["loss_mask"] + x["loss_ar"], rtol=1e-5) for x in train_lines)
    assert list((result.directory / "tensorboard").glob("events*"))
    exported = json.loads((result.export / "config.json").read_text())
    assert exported["marsjax"]["block_size"] == 4
    assert not [p for p in (result.directory / "checkpoints").iterdir() if "tmp" in p.name]


def test_the_export_holds_the_last_weights(straight):
    result, _ = straight
    exported = load(result.export, layout="stacked")
    assert exported.mask_id is not None
    params = nnx.to_pure_dict(nnx.state(exported.model))
    saved = _final_state(result.directory)["params"]
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(saved), strict=True):
        assert np.array_equal(a, b)


def test_resume_is_bitwise(straight, tmp_path):
    stopped, first = _record(config(tmp_path, "checkpoint.stop_after=3"))
    assert stopped.steps == 3
    assert stopped.export is None
    resumed, second = _record(config(tmp_path))
    assert (resumed.steps, len(first), len(second)) == (6, 3, 3)
    for a, b in zip(straight[1], first + second, strict=True):
        assert np.array_equal(a, b)
    want, got = _final_state(straight[0].directory), _final_state(tmp_path)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.array_equal(a, b)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    again = train(config(tmp_path))  # nothing is left to do
    assert (again.steps, again.best) == (6, resumed.best)


def test_a_signal_ends_the_run_behind_a_saved_step(straight, tmp_path, monkeypatch):
    advance, seen, handler = loop._Run._advance, [], signal.getsignal(signal.SIGTERM)

    def interrupted(self, clock):
        seen.append(1)
        if len(seen) == 3:  # an evaluation and a checkpoint are due there
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, clock)

    monkeypatch.setattr(loop._Run, "_advance", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped and saved at step 3; the same command goes on"):
        train(config(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is handler
    result, rows = _record(config(tmp_path))
    assert [np.array_equal(a, b) for a, b in zip(straight[1][3:], rows, strict=True)] == [True] * 3
    assert result.best == straight[0].best  # the evaluation that was left out came first
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "eval"] == [3, 6]


def test_a_second_signal_interrupts_at_once():
    with StopAsked() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt, match="goes on from the newest checkpoint"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_failing_evaluation_loses_no_step(straight, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop.held_out, "evaluate", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(tmp_path, "checkpoint.every=100"))
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]
    assert train(config(tmp_path, "checkpoint.every=100")).best == straight[0].best


def test_the_best_checkpoint_unreadable(tmp_path, monkeypatch):
    score, losses = loop.held_out.evaluate, iter((1.0, 2.0))
    monkeypatch.setattr(loop.held_out, "evaluate", lambda *a, **k: score(*a, **k) | {"loss": next(losses)})
    train(config(tmp_path, "output.export=none"))
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    with pytest.raises(RuntimeError, match=r"no checkpoint of step 3 .*there are: 6. output.export=last"):
        train(config(tmp_path, "output.export=best"))
    assert train(config(tmp_path)).export is not None


@pytest.mark.parametrize("text", ["", "model: {", "- 1", "model: 3\n"])
def test_a_damaged_record_of_the_configuration_is_named(tmp_path, text):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)config.yaml is damaged .*delete this file to go on"):
        train(config(tmp_path))


def test_a_place_that_cannot_be_written_or_is_too_small(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(loop.base_model, "load_model", lambda _: pytest.fail("the model came first"))
    with pytest.raises(ConfigError, match=r"file/run cannot be written: .*Not a directory.*choose another"):
        train(config(tmp_path / "file" / "run"))
    monkeypatch.undo()
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"run has 1e-06 GB free, and a checkpoint takes 0.000\d+ GB; make room"):
        train(config(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == []


def test_reading_a_checkpoint_never_holds_two_states(tmp_path, monkeypatch):
    """Exporting the best, and going on: seen by the live arrays shaped like the embedding and its moments."""
    settings = config(tmp_path, "output.export=best")
    restore, score, held, losses = Checkpoints.restore, loop.held_out.evaluate, [], iter((1.0, 2.0))

    def counted(self, like, step=None):
        leaf = like.params["embed_table"]["embedding"]
        alive = [x for x in jax.live_arrays() if x.shape == leaf.shape and not any(x is y for y in others)]
        held.append((step, len(alive)))
        return restore(self, like, step)

    monkeypatch.setattr(Checkpoints, "restore", counted)
    monkeypatch.setattr(loop.held_out, "evaluate", lambda *a, **k: score(*a, **k) | {"loss": next(losses)})
    others = jax.live_arrays()  # of other tests
    result = train(settings)
    assert result.best["step"] == 3
    assert result.steps == 6
    again = train(settings)
    assert (again.steps, again.best) == (6, result.best)
    assert held == [(3, 0), (None, 0), (3, 0)]
    exported = nnx.to_pure_dict(nnx.state(load(result.export, layout="stacked").model))
    best = ocp.load(Checkpoints(tmp_path / "checkpoints").directory / "3")["params"]
    for a, b in zip(jax.tree.leaves(exported), jax.tree.leaves(best), strict=True):
        assert np.array_equal(a, b)


def test_another_configuration_is_refused(straight):
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate: 0.001 there, 0.5 here"):
        train(config(straight[0].directory, "optimizer.learning_rate=0.5"))


def test_a_diverging_run_stops_with_its_step_and_saves_nothing(tmp_path, monkeypatch):
    make = loop.make_train_step

    def broken(*args, **kwargs):
        step = make(*args, **kwargs)

        def poisoned(state, batch, noisy_length, frozen):
            if int(state.step) == 2:
                state = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
            return step(state, batch, noisy_length, frozen)

        return poisoned

    monkeypatch.setattr(loop, "make_train_step", broken)
    with pytest.raises(TrainingDiverged, match=r"step 3: .*loss is nan.*in another output.directory"):
        train(config(tmp_path))
    assert Checkpoints(tmp_path / "checkpoints").steps() == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["compute.platform=tpu"], "compute.platform=tpu was asked for, but JAX runs on cpu"),
        (["compute.remat=everything"], "compute.remat=everything"),
        (["model.init.num_layer=3"], "unknown num_layer"),
        (["model.init.num_kv_heads=3"], "num_heads=2 must be a multiple"),
        (["data.epochs=1", "optimizer.steps=60"], "hold only 16 batches"),
        (["data.train=problems:nowhere"], "problems:nowhere"),
    ],
)
def test_refused_before_work(tmp_path, overrides, said):
    with pytest.raises((ConfigError, RuntimeError, ValueError), match=said):
        train(config(tmp_path, *overrides))
