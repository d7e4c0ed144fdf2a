import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from marsjax.models import to_stacked
from marsjax.weights import GenerationDefaults, Pretrained, convert, load, save

from .conftest import GOLDEN


def stored(directory):
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_export_equals_its_source(family, layout, tmp_path):
    convert_target = save(load(GOLDEN / family, layout=layout, dtype=jnp.float32), tmp_path / "out")
    source, exported = stored(GOLDEN / family), stored(convert_target)
    assert source.keys() == exported.keys()
    for name, value in source.items():
        np.testing.assert_array_equal(exported[name], value.astype(np.float32))
    fields = json.loads((GOLDEN / family / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert {**fields, "dtype": "float32"} == {name: written[name] for name in fields}
    for file in ("generation_config.json",):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads((GOLDEN / family / file).read_text())


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_shards_with_an_index_and_no_stale_files(tmp_path, arrays, layout):
    pretrained, out = load(GOLDEN / "llama", layout=layout), tmp_path / "out"
    save(pretrained, out, max_shard_bytes=40_000)
    shards = sorted(path.name for path in out.glob("model-*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(shards) > 3
    assert shards == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored(out).values())
    assert all((out / name).stat().st_size < 40_000 + 4096 for name in shards)
    order = [int(name.split(".")[2]) for shard in shards for name in load_file(out / shard) if ".layers." in name]
    assert order == sorted(order)
    (out / "notes.txt").write_text("mine")
    save(load(out, layout=layout), out)  # one file now: shards and index must go, the user's file must stay
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "notes.txt",
    }  # fmt: skip
    for path, value in arrays(load(out, layout=layout).model).items():
        np.testing.assert_array_equal(value, arrays(pretrained.model)[path])


def test_a_crash_leaves_the_old_export(tmp_path, monkeypatch):
    out = save(load(GOLDEN / "llama"), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("marsjax.weights.saving.write_directory", fail)
    for target in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            save(load(GOLDEN / "qwen2"), target)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_of_the_export(tmp_path, dtype):
    save(load(GOLDEN / "llama"), tmp_path, dtype=dtype)
    source = stored(GOLDEN / "llama")
    for name, value in stored(tmp_path).items():
        assert value.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(value, source[name].astype(jnp.dtype(dtype)))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype


def test_refusals_come_before_writing(tmp_path, random_model):
    pretrained = Pretrained(random_model())
    with pytest.raises(ValueError, match="cannot export as int8"):
        save(pretrained, tmp_path / "out", dtype=jnp.int8)
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save(pretrained, tmp_path / "out", max_shard_bytes=0)
    pretrained.generation = GenerationDefaults(eos_ids=(3,), pad_id=3)
    with pytest.raises(ValueError, match="also the end token"):
        save(pretrained, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        save(pretrained, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (".", "is the working directory or holds it"),
        ("..", "is the working directory or holds it"),
        ("../full", "holds other things than an export"),
        ("../file", "is a file"),
        ("/dev", "is a mount point"),
    ],
)
def test_targets_that_would_do_harm_are_refused_before_reading(tmp_path, monkeypatch, target, reason):
    (tmp_path / "here").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match=f"{reason}.*; name a directory that is new, empty or an earlier export"):
        convert("./nowhere", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "here"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_a_source(tmp_path, random_model, arrays, family, tied):
    model = random_model(family=family, tie_embeddings=tied)
    save(Pretrained(to_stacked(model), None, GenerationDefaults((1,), 0)), tmp_path / "a b")
    back = load(tmp_path / "a b")
    assert back.model.config == model.config
    assert back.generation == GenerationDefaults((1,), 0)
    for path, value in arrays(back.model).items():
        np.testing.assert_array_equal(value, arrays(model)[path])


def test_the_end_token_of_training_is_exported(tmp_path, checkpoint):
    copy = checkpoint()
    copy.edit("generation_config.json", eos_token_id=[1, 2], pad_token_id=5)
    pretrained = load(copy.path)
    trained = dataclasses.replace(pretrained, generation=pretrained.generation.with_end(5))
    save(trained, tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) | {"transformers_version": ""} == {
        "_from_model_config": False, "eos_token_id": [5, 1, 2], "pad_token_id": 1, "transformers_version": "",
    } or load(tmp_path / "out").generation == GenerationDefaults(  # fields of the source differ between versions
        (5, 1, 2), 1, None, trained.generation.fields
    )  # fmt: skip


def test_tokenizer_and_chat_template_travel(tmp_path, random_model, word_tokenizer):
    tokenizer = word_tokenizer()
    save(Pretrained(random_model(), tokenizer, GenerationDefaults((1,), 0)), tmp_path / "out")
    back = load(tmp_path / "out").tokenizer
    messages = [{"role": "user", "content": "w5 w6"}]
    assert back("w5 w36")["input_ids"] == tokenizer("w5 w36")["input_ids"] == [5, 36]
    assert back.apply_chat_template(messages, tokenize=False) == "w5 w6 [end] "
    assert (back.eos_token_id, back.pad_token_id) == (1, 0)
    assert "Backend" not in (tmp_path / "out/tokenizer_config.json").read_text()


def test_convert_keeps_the_dtype_of_the_source(tmp_path):
    convert(GOLDEN / "qwen2", tmp_path / "bf16")
    convert(GOLDEN / "qwen2", tmp_path / "f32", dtype="float32")
    for name, value in stored(GOLDEN / "qwen2").items():
        np.testing.assert_array_equal(stored(tmp_path / "bf16")[name], value)
        assert stored(tmp_path / "f32")[name].dtype == np.float32


def test_host_memory_beside_the_model(subprocess_python, tmp_path):
    out = subprocess_python(
        f"""
        import resource
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from marsjax.models import Decoder, ModelConfig
        from marsjax.weights import Pretrained, load, save
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        config = ModelConfig("llama", 8192, 1024, 2816, 8, 16, 4, 64, tie_embeddings=False)
        model = Decoder(config, rngs=nnx.Rngs(0), layout="stacked", param_dtype=jnp.bfloat16)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        np.asarray(model.layers.mlp.up.kernel[0])
        before = peak()
        save(Pretrained(model), {str(tmp_path / "out")!r})
        print(size, peak() - before)
        """
    )
    size, extra = map(int, out.split())
    assert extra < 0.4 * size, (size, extra)
    out = subprocess_python(
        f"""
        import resource
        import jax, jax.numpy as jnp
        from flax import nnx
        from marsjax.weights import load
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        load({str(GOLDEN / "llama")!r})
        before = peak()
        model = load({str(tmp_path / "out")!r}).model
        print(sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))), peak() - before)
        """
    )
    size, extra = map(int, out.split())
    assert extra < 1.35 * size, (size, extra)


def test_files_of_the_user_stay_and_links_are_followed(tmp_path):
    """Only what an export consists of is replaced; a link to a directory stays a link."""
    pretrained = load(GOLDEN / "qwen3")
    real = save(pretrained, tmp_path / "real")
    mine = ("tokenizer_notes.txt", "config.json.bak", "modelA.safetensors")
    for name in mine:
        (real / name).write_text("mine")
    stale = real / "model-00001-of-00002.safetensors"
    stale.write_text("stale")
    (tmp_path / "link").symlink_to("real")
    save(pretrained, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert [name for name in mine if (real / name).read_text() == "mine"] == list(mine)
    assert not stale.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
