"""`marsjax train` with an adapter: what it trains, saves, goes on from, exports and decodes."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml
from flax import nnx

from marsjax import weights
from marsjax.data.problems import problem
from marsjax.decoding.generator import Generator
from marsjax.demo import assets
from marsjax.models.adapters import split
from marsjax.training import load_config, train
from marsjax.training.checkpoints import Checkpoints
from marsjax.training.config import AnotherRun, ConfigError
from marsjax.training.export import export
from marsjax.training.plan import model_config
from marsjax.weights import CheckpointError

BASE = str(assets() / "demo_ar")
SETTINGS = [
    f"model.source={BASE}", "data.train='problems:train'", "data.length=112", "data.batch_size=4", "optimizer.steps=4",
    "optimizer.learning_rate=2e-3", "optimizer.warmup=0", "compute.unroll_layers=true", "checkpoint.every=2",
    "evaluation.data='problems:validation,count=8'", "evaluation.every=4", "output.tensorboard=false",
    "evaluation.decode_prompts=2", "evaluation.max_new_tokens=16",
]  # fmt: skip
MTP = [*SETTINGS, "objective={name: mtp, block_size: 3, anchors: 6}", "adapter.rank=4"]


def leaves(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(load_config(None, [*MTP, f"output.directory={tmp_path_factory.mktemp('mtp')}"]))


def test_the_model_itself_is_untouched_and_answers_as_before(run):
    adapted, base = weights.load(BASE, adapter=run.export), weights.load(BASE)
    own, trained = split(leaves(adapted.model))
    jax.tree.map(np.testing.assert_array_equal, own, leaves(base.model))
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(trained))
    assert adapted.hf_config["marsjax"]["block_size"] == 3
    prompts = [problem(0, i, "test").question for i in range(4)]
    ahead, alone = Generator(adapted), Generator(base, strategy="ar")
    assert (ahead.plan.name, ahead.plan.asks) == ("comb", 3)
    wanted = [result.ids for result in alone.generate(prompts, max_new_tokens=24)]
    assert [result.ids for result in ahead.generate(prompts, max_new_tokens=24)] == wanted


def test_checkpoints_hold_the_adapter_alone_and_are_gone_on_from(run, tmp_path):
    values = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    evaluation = values[-1]
    assert evaluation["kind"] == "eval"
    assert set(evaluation["mask_offsets"]) == set(evaluation["sampler_offsets"]) == {"2", "3", "4"}
    assert evaluation["tokens_per_forward"] >= 1
    adapter = sum(x.size for x in jax.tree.leaves(split(leaves(weights.load(BASE, adapter=run.export).model))[1]))
    size = sum(path.stat().st_size for path in (run.directory / "checkpoints").rglob("*") if path.is_file())
    assert size < 4 * 3.2 * adapter + 200_000  # weights and two moments of the newest step

    settings = [*MTP, f"output.directory={tmp_path}"]
    train(load_config(None, [*settings, "checkpoint.stop_after=2"]))
    again = train(load_config(None, settings))
    one, two = (split(leaves(weights.load(BASE, adapter=path).model))[1] for path in (run.export, again.export))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]


def test_another_adapter_is_another_run(tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    one, other = (load_config(None, [*MTP, f"adapter.rank={r}", f"output.directory={tmp_path}"]) for r in (4, 8))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(one.to_dict()))
    with pytest.raises(AnotherRun, match=r"adapter\.rank: 4 there, 8 here") as error:
        train(other)
    assert "take its export as adapter.source" in str(error.value)
    full = load_config(None, [*SETTINGS, "objective.name=sft", f"output.directory={tmp_path}"])
    with pytest.raises(AnotherRun, match=r"take its export as adapter\.source"):  # what lies there is an adapter
        train(full)


def test_an_adapter_is_trained_further(run, tmp_path):
    """On other data, from the very weights of its files; the same seed makes the same run."""
    settings = [*MTP, f"adapter.source={run.export}", "data.seed=1", "optimizer.steps=2", "evaluation.data=null",
                "evaluation.decode_prompts=0"]  # fmt: skip
    still = train(load_config(None, [*settings, "optimizer.learning_rate=1e-30", f"output.directory={tmp_path / '0'}"]))
    before, same = (split(leaves(weights.load(BASE, adapter=path).model))[1] for path in (run.export, still.export))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-20), before, same)
    further = train(load_config(None, [*settings, f"output.directory={tmp_path / '1'}"]))
    after = split(leaves(weights.load(BASE, adapter=further.export).model))[1]
    moved = [float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
    assert 0 < max(moved) < 0.02  # two steps of 2e-3, not what a new adapter is away


def test_a_plan_looks_at_the_adapter_to_train_further(run, tmp_path):
    settings = [*MTP, f"output.directory={tmp_path}"]
    assert model_config(load_config(None, [*settings, f"adapter.source={run.export}"])).adapter.masks == 3
    with pytest.raises(CheckpointError, match="does not exist"):
        model_config(load_config(None, [*settings, f"adapter.source={tmp_path / 'nowhere'}"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter.rank": 8}, "rank 4 there, 8 here; alpha 8.0 there, 16.0 here"),
        ({"objective.block_size": 2}, "masks 3 there, 2 here"),
        ({"objective.sampler": "false"}, "sampler True there, False here"),
        ({"adapter.targets": "[q]"}, r"targets \['down', .*\] there, \['q'\] here; set adapter.rank"),
    ],
    ids=str,
)
def test_an_adapter_of_another_kind_is_not_trained_further(run, tmp_path, settings, message):
    overrides = [f"{key}={value}" for key, value in settings.items()]
    with pytest.raises(ConfigError, match=message):
        train(load_config(None, [*MTP, f"adapter.source={run.export}", *overrides, f"output.directory={tmp_path}"]))


def test_a_checkpoint_exports_as_the_run_does(run, tmp_path):
    path, step = export(run.directory, tmp_path / "later")
    assert step == 4
    for name in ("marsjax_adapter.safetensors", "marsjax_adapter.json", "adapter_config.json"):
        assert (path / name).read_bytes() == (run.export / name).read_bytes()


def test_another_base_is_noticed(run, tmp_path):
    """Its weights are not in the checkpoints, and are read again from where they were."""
    shutil.copytree(run.directory, tmp_path / "run")
    base = shutil.copytree(BASE, tmp_path / "base")
    found = safetensors.numpy.load_file(base / "model.safetensors")
    found["model.norm.weight"] *= 1.1
    safetensors.numpy.save_file(found, base / "model.safetensors")
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace(BASE, str(base)))
    with pytest.raises(ConfigError, match="belong to an adapter of other weights than"):
        train(load_config(saved, [f"output.directory={tmp_path / 'run'}", "optimizer.steps=4"]))


@pytest.mark.parametrize("gated", [True, False])
def test_mars_as_an_adapter(tmp_path, gated):
    """Gated it answers as before at τ = 1; a plain one merges into a model with a mask token."""
    overrides = ["objective={name: mars, block_size: 4}", f"adapter={{rank: 4, gated: {str(gated).lower()}}}"]
    run = train(load_config(None, [*SETTINGS, *overrides, f"output.directory={tmp_path / 'run'}"]))
    adapted, base = weights.load(BASE, adapter=run.export), weights.load(BASE)
    prompts = [problem(0, i, "test").question for i in range(3)]
    generator = Generator(adapted)
    assert (generator.plan.name, generator.plan.window) == ("mars", 4)
    found = [result.ids for result in generator.generate(prompts, max_new_tokens=16)]
    if gated:
        alone = Generator(base, strategy="ar")
        assert found == [result.ids for result in alone.generate(prompts, max_new_tokens=16)]
        with pytest.raises(ValueError, match="it is gated"):
            weights.convert(BASE, tmp_path / "merged", adapter=run.export)
        return
    merged = weights.load(weights.convert(BASE, tmp_path / "merged", adapter=run.export))
    assert merged.mask_id is not None
    assert found == [result.ids for result in Generator(merged, strategy="mars").generate(prompts, max_new_tokens=16)]


def test_plain_fine_tuning_of_an_adapter(tmp_path):
    overrides = ["objective.name=sft", "adapter={rank: 2, gated: false, targets: [q, v]}"]
    run = train(load_config(None, [*SETTINGS, *overrides, f"output.directory={tmp_path / 'run'}"]))
    trained = split(leaves(weights.load(BASE, adapter=run.export).model))[1]
    assert set(trained["layers"][0]) == {"attn"}
    assert set(trained["layers"][0]["attn"]) == {"q", "v"}
    assert Generator(weights.load(BASE, adapter=run.export)).plan.name == "ar"
    written = json.loads((run.export / "marsjax_adapter.json").read_text())
    assert written["training"] == {}  # how to decode, its base says
