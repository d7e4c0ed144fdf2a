import json
from pathlib import Path

import pytest
import yaml

from marsjax.training.config import ConfigError, differences
from marsjax.training.config_text import describe, load_config
from marsjax.training.yaml_text import read_yaml

GOOD = {
    "model": {"source": "somewhere"},
    "data": {"train": "problems:train", "epochs": 2},
    "output": {"directory": "runs/x"},
}


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return path


def test_file_defaults_and_overrides(good):
    config = load_config(good, ["optimizer.learning_rate=1e-5", "data.length=64", "optimizer.clip_norm=null",
                                "objective.name=sft", "output.tensorboard=false", "model.source=a dir/b"])  # fmt: skip
    assert config.optimizer.learning_rate == 1e-5
    assert config.data.length == 64
    assert config.optimizer.clip_norm is None
    assert config.objective.name == "sft"
    assert config.output.tensorboard is False
    assert config.model.source == "a dir/b"
    assert config.optimizer.b2 == 0.999
    assert yaml.safe_load(yaml.safe_dump(config.to_dict())) == config.to_dict()


def test_the_last_override_wins_and_merges_mappings(good):
    config = load_config(good, ["model.source=null", "model.init={num_layers: 2}", "model.init={num_heads: 4}",
                                "model.tokenizer=demo", "data.length=8", "data.length=16"])  # fmt: skip
    assert config.model.init == {"num_layers": 2, "num_heads": 4}
    assert config.data.length == 16


def test_a_field_of_init_by_its_own_key(good):
    config = load_config(good, ["model.source=null", "model.tokenizer=demo", "model.init.num_layers=3"])
    assert config.model.init == {"num_layers": 3}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rat=1", r"unknown key optimizer.learning_rat; did you mean optimizer.learning_rate\?"),
        ("learning_rate=1", r"unknown key learning_rate; did you mean optimizer.learning_rate\?"),
        ("dat.length=4", r"did you mean data\?"),
        ("data.qqqq=4", "known here: data.train"),
        ("data.length", "not of the form section.key=value"),
        ("data.length=4.5", "data.length must be an integer, got 4.5"),
        ("data.length=true", "data.length must be an integer, got True"),
        ("data.length=[", "not valid YAML"),
        ("data={length: 8, length: 16}", "the key 'length' is given twice, in line 1 and line 1"),
        ("data=4", "data must be a mapping"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number, got 'fast'"),
        ("objective.name=marss", r"one of mars, sft, block_diffusion, mtp, got 'marss'; did you mean mars\?"),
        ("output.tensorboard=1", "must be true or false"),
        ("data.batch_size=0", "data.batch_size must be at least 1"),
        ("data.length=1", "data.length must be at least 2"),
        ("data.accumulation=3", "batch_size=32 is not a multiple of data.accumulation=3"),
        ("data.epochs=null", "optimizer.steps or data.epochs"),
        ("data.train=''", "data.train is missing"),
        ("data.seed=-1", "data.seed=-1 is outside"),
        ("model.source=null", "one of model.source"),
        ("model.tokenizer=demo", "model.tokenizer goes with model.init"),
        ("output.directory=''", "output.directory is missing"),
        ("output.directory='gs://bucket/run'", r"output.directory=gs://bucket/run is a URL; it must be a mounted path"),
        ("output.export=best", "output.export=best needs evaluation.data"),
        ("compute={remat: nothing_saveable, unroll_layers: true}", "compute.remat=nothing_saveable acts on the scan"),
        ("optimizer.learning_rate=0", "learning_rate=0.0 must be above 0"),
        ("optimizer.learning_rate=.nan", "learning_rate=nan must be a finite number"),
        ("optimizer.learning_rate=inf", "learning_rate=inf must be a finite number"),
        ("optimizer.weight_decay=1e999", "optimizer.weight_decay=inf must be a finite number"),
        ("objective.ar_weight=.inf", "objective.ar_weight=inf must be a finite number"),
        pytest.param(f"optimizer.eps={'9' * 400}", "optimizer.eps must be a number", id="huge"),
        ("optimizer.warmup=-1", "optimizer.warmup=-1.0"),
        ("optimizer.b2=1.5", "optimizer.b2=1.5 is outside"),
        ("objective.ar_weight=-1", "ar_weight=-1.0 must be at least 0"),
        ("evaluation.tau=1.5", "evaluation.tau=1.5 is outside"),
        ("objective.name=mtp", "objective.name=mtp trains an adapter: set adapter.rank"),
        ("objective.anchors=4", "objective.anchors=4 belongs to objective.name=mtp"),
        ("adapter.alpha=3", "adapter.alpha=3.0 goes with adapter.rank"),
        ("adapter.source=runs/a/export", "adapter.source=runs/a/export goes with adapter.rank"),
        ("adapter={rank: 0}", ".yaml: adapter rank must be an integer of at least 1, got 0"),
        ("adapter.targets=q", "adapter.targets must be a list, got 'q'"),
        (
            "adapter={rank: 2, targets: [[q]]}",
            "targets must be some of q, k, v, o, gate, up, down, each once; got",
        ),
        ("{model: {source: null, init: {}, tokenizer: demo}, adapter: {rank: 2}}", "adapter.rank with model.init"),
        ("{objective: {name: mars, ar_weight: 2}, adapter: {rank: 2}}", "ar_weight=2.0: under a gated adapter"),
        ("{objective: {name: mtp}, adapter: {rank: 2}, data: {fill_last_block_with_end: true}}", "objective.name=mtp"),
        ("{objective: {name: sft}, data: {fill_last_block_with_end: true}}", "fills blocks, which objective.name=sft"),
        (
            "adapter={rank: 2, targets: [q, z]}",
            "targets must be some of q, k, v, o, gate, up, down, each once; got",
        ),
        ("{objective: {name: block_diffusion}, adapter: {rank: 2}}", "lets text see ahead in its block"),
        ("{objective: {name: sft}, adapter: {rank: 2}}", "set adapter.gated=false"),
        (
            "{objective: {name: mtp, block_size: 512}, adapter: {rank: 2}}",
            "masks reach past documents of data.length",
        ),
        ("{objective: {name: mtp, anchors: 0}, adapter: {rank: 2}}", "objective.anchors=0 must be at least 1"),
        ("{objective: {name: mtp, tv_weight: -1}, adapter: {rank: 2}}", "objective.tv_weight=-1.0 must be at least 0"),
        ("{objective: {name: mtp, sampler: false, free_running: true}, adapter: {rank: 2}}", "is about the sampler"),
        ("{objective: {name: mtp, tv_weight: 1}, adapter: {rank: 2, gated: false}}", "adapter.gated=true"),
    ],
)
def test_what_is_refused(good, override, said):
    several = yaml.safe_load(override) if override.startswith("{") else None
    overrides = [f"{name}={json.dumps(value)}" for name, value in several.items()] if several else [override]
    with pytest.raises(ConfigError, match=said):
        load_config(good, overrides)


def test_the_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    for text, said in (("data: {lenght: 4}", "bad.yaml: unknown key data.lenght; did you mean data.length"),
                       ("- 1", "bad.yaml: the configuration must be a mapping"), ("a: [", "not valid YAML"),
                       ("data: !!python/object/apply:os.getcwd []", "not valid YAML")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_config(path)


def test_a_key_given_twice_is_named_with_its_lines(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("data:\n  length: 8\n  train: 'a.jsonl'\n  'length': 16\n")
    with pytest.raises(ConfigError, match=r"twice.yaml is not .*the key 'length'.*line 2 and line 4; keep one"):
        load_config(path)
    assert read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        read_yaml("!!python/object/apply:os.getcwd []")


def test_shipped_configurations_load():
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert len(files) >= 3
    for file in files:
        load_config(file)


def test_differences_name_both_values(good):
    old, new = (load_config(good, o).to_dict() for o in (["data.length=8"], ["data.length=9", "checkpoint.every=7"]))
    assert differences(old, new) == ["data.length: 8 there, 9 here"]


def test_keys_added_since_a_run_was_saved_count_as_their_defaults(good):
    old, new = load_config(good).to_dict(), load_config(good).to_dict()
    del old["data"]["seed"], old["compute"]
    assert differences(old, new) == []
    new["data"]["epochs"] = 7
    assert differences(old, new) == ["data.epochs: 2 there, 7 here"]
    new["data"]["epochs"] = 2
    old["data"]["gone"] = 3
    assert "data.gone: 3 there, None here" in differences(old, new)


def test_how_a_step_is_computed_may_change(good):
    """On fewer chips it may need to."""
    old, new = load_config(good).to_dict(), load_config(good).to_dict()
    new["data"]["accumulation"], new["compute"]["remat"] = 2, "nothing_saveable"
    assert differences(old, new) == []


def test_description_names_every_key(good):
    text = describe()
    for section, values in load_config(good).to_dict().items():
        for key in values:
            assert f"  {section}.{key}=" in text


def test_a_mixture_is_one_value_with_weights_above_0():
    mixture = {"jsonl:a.jsonl": 0.7, "problems:train,count=10": 0.3}
    base = ["model.source=x", "output.directory=y", "optimizer.steps=3", f"data.train={mixture}"]
    assert load_config(None, base).data.train == mixture
    assert load_config(None, [*base, "data.train={b.jsonl: 1}"]).data.train == {"b.jsonl": 1}
    assert load_config(None, [*base, "data.train=b.jsonl"]).data.train == "b.jsonl"
    for value, message in (
        ("{a: 0}", "data.train: the weight of a must be a number above 0, got 0"),
        ("{a: 1, b: true}", "the weight of b must be a number above 0, got True"),
        ("{a: x}", "the weight of a must be a number above 0, got 'x'"),
        ("{a: .nan}", "the weight of a must be a number above 0, got nan"),
        ("{3: 1}", "source must be a string such as jsonl:PATH, got 3"),
        ("{}", "data.train is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(None, [*base, f"data.train={value}"])
