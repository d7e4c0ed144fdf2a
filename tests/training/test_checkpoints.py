import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from marsjax.training.checkpoints import Checkpoints, SaveError
from marsjax.training.state import TrainState


def state(step):
    params = {"a": {"kernel": jnp.arange(6.0).reshape(2, 3) / 7 + step}}
    moments = ({"mu": jax.tree.map(lambda x: x * 1.0000001, params)}, ())
    return TrainState(params, moments, jnp.int32(step), jax.random.fold_in(jax.random.key(3), step))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.array_equal(x, y)


@pytest.mark.parametrize("where", ["plain", "with a space", "~", "relative"])
def test_round_trip(tmp_path, monkeypatch, where):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    directory = {"plain": tmp_path / "a", "with a space": tmp_path / "a b", "~": "~/c", "relative": "d/e"}[where]
    host = {"data": {"iterator": {"next": 2**40}, "none": None}, "progress": {"best": {"loss": 0.1}}}
    checkpoints = Checkpoints(directory)
    assert checkpoints.restore(state(0)) is None
    checkpoints.save(state(3), host)
    checkpoints.wait()
    checkpoints = Checkpoints(directory)
    restored, notes = checkpoints.restore(state(0))
    assert_same(restored, state(3))
    assert notes == host
    assert any(tmp_path.iterdir())
    assert not (tmp_path / "~").exists()


def test_newest_and_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        checkpoints.save(state(step), {}, best_step=best)
        checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    assert_same(checkpoints.restore(state(0), step=2)[0], state(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "4", "5"]


@pytest.mark.parametrize("damage", ["empty", "no metadata", "no arrays"])
def test_a_half_written_step_is_skipped_and_named(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (2, 4):
        checkpoints.save(state(step), {"at": step})
        checkpoints.wait()
    newest = tmp_path / "4"
    if damage == "empty":
        shutil.rmtree(newest)
        newest.mkdir()
    elif damage == "no metadata":
        (newest / "_CHECKPOINT_METADATA").unlink()
        for found in newest.rglob("_METADATA"):
            found.unlink()
    else:
        for found in [*newest.rglob("d"), *newest.rglob("ocdbt.process_0")]:
            shutil.rmtree(found, ignore_errors=True)
    checkpoints = Checkpoints(tmp_path, keep=9)
    with caplog.at_level(logging.WARNING):
        restored, host = checkpoints.restore(state(0))
        assert_same(restored, state(2))
        assert host == {"at": 2}
        assert "step 4" in caplog.text
        checkpoints.save(state(4), {"at": "again"})
        checkpoints.wait()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(state(0))[1] == {"at": "again"}


def test_a_step_below_an_unreadable_newest_one_survives_its_own_saving(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state(2), {})
    checkpoints.wait()
    (tmp_path / "4").mkdir()
    assert int(checkpoints.restore(state(0))[0].step) == 2
    checkpoints.save(state(3), {})
    checkpoints.wait()
    assert checkpoints.steps() == [3]
    assert_same(checkpoints.restore(state(0))[0], state(3))


def test_only_unreadable_steps_is_an_error(tmp_path):
    (tmp_path / "4").mkdir()
    with pytest.raises(RuntimeError, match="step 4"):
        Checkpoints(tmp_path).restore(state(0))


def test_stale_temporary_directories_do_not_stop_saving(tmp_path):
    for name in ("4.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-7", "6.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "half").write_bytes(b"x")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(state(0)) is None
    checkpoints.save(state(4), {})
    checkpoints.wait()
    assert_same(checkpoints.restore(state(0))[0], state(4))
    assert [p.name for p in tmp_path.iterdir()] == ["4"]  # a state of a large model would fill the disk


def test_a_failing_writer_names_the_step(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(state(2), {})
    checkpoints.wait()
    monkeypatch.setattr(ocp, "save_async", full)
    with pytest.raises(SaveError, match=r"step 4 .*No space left.*newest good one is step 2"):
        checkpoints.save(state(4), {})


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "c").write_text("a file where the directory should be")
    with pytest.raises(SaveError, match=r"step 4 .*no earlier one"):
        Checkpoints(tmp_path / "c").save(state(4), {})
