"""`marsjax export`, and a run's profile."""

import filecmp

import jax
import numpy as np
import pytest
from flax import nnx

from marsjax import cli
from marsjax.training import load_config, train
from marsjax.training.checkpoints import Checkpoints
from marsjax.training.config import ConfigError
from marsjax.training.export import export
from marsjax.weights import load

MODEL = {"family": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2,
         "num_kv_heads": 1, "head_dim": 16, "max_positions": 256}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    config = load_config(None, [
        f"model.init={MODEL}", "model.tokenizer=demo", "data.train=problems:train,count=64", "data.length=96",
        "data.batch_size=4", "optimizer.steps=4", "optimizer.learning_rate=1e-3", "checkpoint.every=2",
        "checkpoint.keep=2", "output.tensorboard=false", f"output.directory={directory}", "output.profile_at=2",
        "output.profile_steps=1",
    ])  # fmt: skip
    train(config)
    return directory


def test_the_newest_is_what_the_run_wrote(run, tmp_path, capsys):
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "step 4" in capsys.readouterr().out
    same, different, odd = filecmp.cmpfiles(
        run / "export", tmp_path / "out", [p.name for p in (run / "export").iterdir()]
    )
    assert (different, odd) == ([], [])
    assert "model.safetensors" in same


def test_a_step_by_number(run):
    path, step = export(run, step=2)
    assert (path.name, step) == ("export-2", 2)
    got = nnx.to_pure_dict(nnx.state(load(path, layout="stacked").model))
    checkpoints = Checkpoints(run / "checkpoints")
    wanted = {**checkpoints.restore_params(_like(run), 2).params}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    newest = checkpoints.restore_params(_like(run)).params
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(newest), strict=True))


def _like(run):
    from marsjax.training import base_model, setup
    from marsjax.training.optimizer import make_optimizer, make_schedule
    from marsjax.training.state import abstract_state

    config = load_config(run / "config.yaml")
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 4))
    mesh = setup.make_mesh(config, jax.devices()[:1])
    return abstract_state(base_model.describe_model(config).model.config, optimizer, mesh)


def test_what_cannot_be_exported(run, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: there is no config.yaml"):
        export(tmp_path)
    with pytest.raises(RuntimeError, match=r"no checkpoint of step 3 in .*there are: 2, 4. .*no --step"):
        export(run, step=3)


def test_a_profile_was_written(run):
    assert list((run / "profile").rglob("*.xplane.pb"))
