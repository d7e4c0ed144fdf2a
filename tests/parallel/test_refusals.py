"""What a run over a mesh cannot do is said before its first step, with the numbers; and a disk that fills up."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh, AxisType

from marsjax.data.batch import BatchFormat
from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.pipeline import TrainBatches, load_rows
from marsjax.data.sources import DataError
from marsjax.models import ModelConfig
from marsjax.training import ConfigError, load_config, loop, setup, train
from marsjax.training.checkpoints import Checkpoints

INIT = (
    "{family: qwen2, hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2, head_dim: 8}"
)


def settings(directory, *overrides):
    return [f"model.init={INIT}", "model.tokenizer=demo", "data.train=problems:train,count=64", "data.length=112",
            "data.batch_size=4", "optimizer.steps=4", "checkpoint.every=2", "output.tensorboard=false",
            "output.export=none", f"output.directory={directory}", *overrides]  # fmt: skip


def command(tmp_path, *overrides, devices=8, before=""):
    """The real command on `devices` devices, in a process that runs the statement `before` first."""
    (tmp_path / "config.yaml").write_text("{}")
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}
    code = f"import sys\n{before}\nfrom marsjax.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = ["-c", code, "train", str(tmp_path / "config.yaml"), *settings(tmp_path / "run", *overrides)]
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.tensor=4"], "parallel.tensor=4 does not divide this model's num_kv_heads=2; use fsdp instead"),
        (
            ["data.batch_size=12"],
            "a microbatch of 12 rows (data.batch_size / data.accumulation) is no multiple of the 8",
        ),
    ],
)
def test_the_command_refuses_a_mesh(tmp_path, overrides, said):
    done = command(tmp_path, *overrides)
    assert done.returncode == 1
    assert said in done.stderr
    assert "step 1/" not in done.stdout
    assert not (tmp_path / "run" / "checkpoints").exists()


MODEL = ModelConfig("qwen2", 512, 48, 96, 2, 6, 2, 8)


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("sizes", "overrides", "said"),
    [
        ({"tensor": 4}, [], r"tensor=4 does not divide this model's num_heads=6, num_kv_heads=2"),
        ({"fsdp": 32}, ["data.batch_size=32"], r"parallel.fsdp=32 does not divide this model's hidden_size=48"),
        ({"data": 2, "fsdp": 4}, [], r"microbatch of 4 rows .* no multiple of the 8 groups .*\(data=2, fsdp=4\)"),
        ({"slice": 2, "fsdp": 2}, ["data.accumulation=2"], r"microbatch of 2 rows .* of the 4 groups"),
    ],
)
def test_model_and_batch_against_the_mesh(sizes, overrides, said):
    with pytest.raises(ConfigError, match=said):
        setup.check_mesh(load_config(None, settings("x", *overrides)), MODEL, mesh(**sizes))


def test_a_mesh_that_fits_is_taken():
    config = load_config(None, settings("x", "data.batch_size=16"))
    setup.check_mesh(config, MODEL, mesh(slice=2, data=2, fsdp=4, tensor=2))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.fsdp=3"], "data=1, fsdp=3, tensor=1 do not fit 8 devices; one of them may be -1"),
        (["parallel.fsdp=4"], "fsdp=4, tensor=1 do not fit 8 devices"),
        (["parallel.tensor=3"], "fsdp=-1, tensor=3 do not fit 8 devices; the product must divide the devices"),
        (["parallel.data=16"], "data=16, fsdp=-1, tensor=1 do not fit 8 devices"),
    ],
)
def test_a_mesh_of_another_size_than_the_devices(overrides, said):
    devices = [SimpleNamespace(platform="cpu", id=i) for i in range(8)]
    with pytest.raises(ConfigError, match=said):
        setup.make_mesh(load_config(None, settings("x", *overrides)), devices)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.data=-1"], "of parallel.slice, data, fsdp and tensor only one may be -1"),
        (["parallel.tensor=0"], "parallel.tensor=0 must be at least 1, or -1"),
        (["parallel.accelerator=v9-16"], "parallel.accelerator: 'v9-16': unknown TPU generation v9"),
        (["parallel.accelerator=v5p-30"], "parallel.accelerator: 'v5p-30' is no slice of that kind; known are v5p-8"),
        (["parallel.accelerator=big"], "parallel.accelerator: 'big' is no TPU slice"),
        (["parallel.fsdq=2"], "unknown key parallel.fsdq; did you mean parallel.fsdp"),
    ],
)
def test_settings_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, settings("x", *overrides))


def test_sources_without_a_count(tmp_path):
    with pytest.raises(ConfigError, match=r"data.packing=true needs the number of rows: problems:train,count=10000"):
        train(load_config(None, settings(tmp_path, "data.train=problems:train", "data.packing=true")))
    tokenizer = demo_tokenizer()
    form = BatchFormat(4, 112, 4, mask_id=512, end_id=tokenizer.eos_token_id)
    with pytest.raises(DataError, match="a run of several processes needs: problems:train,count=10000"):
        TrainBatches(load_rows("problems:train", tokenizer, length=112), form, seed=0, local=[0, 1])


def test_decoding_by_several_processes(tmp_path, monkeypatch):
    decodes = ["evaluation.data=problems:validation,count=9", "evaluation.decode_prompts=4"]
    monkeypatch.setattr(loop.base_model, "load_model", lambda *_: pytest.fail("the model came first"))
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"decode_prompts=4: .* this run has 2; set it to 0"):
        train(load_config(None, settings(tmp_path, *decodes)))


def test_another_platform_or_slice(monkeypatch):
    with pytest.raises(RuntimeError, match=r"compute.platform=tpu was asked for, but JAX runs on cpu"):
        setup.check_platform(load_config(None, settings("x", "compute.platform=tpu")))
    monkeypatch.setattr(setup.jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(setup.jax, "device_count", lambda: 8)
    monkeypatch.setattr(setup.jax, "devices", lambda: [SimpleNamespace(device_kind="TPU v5 lite")] * 8)
    with pytest.raises(RuntimeError, match=r"v5p-32 .* means 16 chips of TPU v5, but here are 8 of TPU v5 lite"):
        setup.check_platform(load_config(None, settings("x", "parallel.accelerator=v5p-32")))
    assert setup.check_platform(load_config(None, settings("x", "parallel.accelerator=v5e-8"))) == "tpu"


def test_a_full_disk_ends_the_command(tmp_path):
    """A limit on the size of files stands for the disk: the writer fails behind the loop's back."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    done = command(tmp_path, devices=1, before=limit)
    assert done.returncode == 1
    assert "writing the checkpoint of step 2 to" in done.stderr
    assert "There is no earlier one; free the disk or choose another output.directory" in done.stderr


def test_what_is_being_written_when_a_run_ends_is_not_lost(tmp_path, monkeypatch):
    """The writer is at work when the next step fails: the run waits for it."""
    waited, save_async, advance = [], loop.Checkpoints.save.__globals__["ocp"].save_async, loop._Run._advance

    def slow(path, *arguments, **options):
        response = save_async(path, *arguments, **options)
        return SimpleNamespace(result=lambda *limit: (waited.append(path.name), response.result(*limit))[1])

    def failing(self, clock):
        if int(self.state.step) == 2:
            raise ArithmeticError("step 3")
        return advance(self, clock)

    monkeypatch.setattr("marsjax.training.checkpoints.ocp.save_async", slow)
    monkeypatch.setattr(loop._Run, "_advance", failing)
    with pytest.raises(ArithmeticError):
        train(load_config(None, settings(tmp_path)))
    assert waited == ["2"]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]
