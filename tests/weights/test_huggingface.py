import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from marsjax.models import UnsupportedModel
from marsjax.parallel.sharding import make_mesh
from marsjax.weights import CheckpointError, load

from .conftest import GOLDEN

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_reads_every_dtype_into_every_dtype(checkpoint, stored, dtype, layout):
    copy = checkpoint()
    copy.weights = {name: value.astype(stored) for name, value in copy.weights.items()}
    model = load(copy.path, dtype=dtype, layout=layout).model
    layer = model.layers if layout == "stacked" else model.layers[2]
    kernel = layer.attn.q.kernel[...][2] if layout == "stacked" else layer.attn.q.kernel[...]
    expected = copy.weights["model.layers.2.self_attn.q_proj.weight"].T.astype(dtype)
    assert kernel.dtype == dtype
    np.testing.assert_array_equal(np.asarray(kernel), expected)


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_a_mesh_gets_the_same_arrays(arrays, layout):
    plain = load(GOLDEN / "qwen2", layout=layout)
    spread = load(GOLDEN / "qwen2", layout=layout, mesh=make_mesh(fsdp=1, tensor=1))
    for path, value in arrays(plain.model).items():
        np.testing.assert_array_equal(arrays(spread.model)[path], value)


def test_every_device_reads_only_its_slice(subprocess_python):
    subprocess_python(
        f"""
        import numpy as np
        from flax import nnx
        from marsjax.parallel.sharding import make_mesh
        from marsjax.weights import load, save
        from marsjax.weights.safetensors_files import FileTensor
        sizes, plain = [], FileTensor.read
        def read(self, *where):
            part = plain(self, *where)
            sizes.append((self.name, part.size))
            return part
        FileTensor.read = read
        path = {str(GOLDEN / "qwen3")!r}
        whole = load(path, layout="stacked")
        del sizes[:]
        spread = load(path, layout="stacked", mesh=make_mesh(fsdp=2, tensor=2))
        name = "model.layers.1.mlp.down_proj.weight"
        assert [n for name_, n in sizes if name_ == name] == [48 * 80 // 4] * 4, sizes
        a, b = (dict(nnx.state(p.model).flat_state()) for p in (whole, spread))
        kernel = b["layers", "mlp", "down", "kernel"][...]
        assert kernel.addressable_shards[0].data.shape == (2, 40, 24), kernel.sharding
        for key in a:
            np.testing.assert_array_equal(np.asarray(a[key][...]), np.asarray(b[key][...]))
        """
    )


def test_one_report_of_all_problems(checkpoint):
    copy = checkpoint()
    weights = copy.weights
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].T.copy()
    weights["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    weights["model.layers.1.input_layernorm.weight"] = np.zeros(48, np.int32)
    copy.weights = weights
    with pytest.raises(CheckpointError) as error:
        load(copy.path)
    text = str(error.value)
    assert "4 problem(s)" in text
    assert "missing: model.norm.weight [48]" in text
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is [48, 64], expected [64, 48]" in text
    assert "unexpected: model.layers.7.mlp.up_proj.weight [2, 2]" in text
    assert "unsupported dtype: model.layers.1.input_layernorm.weight is I32" in text


def test_rotary_buffers_are_ignored(checkpoint):
    copy = checkpoint()
    copy.weights = {**copy.weights, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    load(copy.path)


def test_untied_without_a_head(checkpoint):
    copy = checkpoint()
    copy.edit(tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight .*tie_word_embeddings"):
        load(copy.path)


def test_tied_with_another_head(checkpoint):
    copy = checkpoint()
    other = copy.weights[EMBEDDING].copy()
    other[95, 47] += 1
    copy.weights = {**copy.weights, "lm_head.weight": other}
    with pytest.raises(CheckpointError, match="contradiction"):
        load(copy.path)


def test_tied_with_an_equal_head(checkpoint):
    copy = checkpoint()
    copy.weights = {**copy.weights, "lm_head.weight": copy.weights[EMBEDDING].copy()}
    assert load(copy.path).model.head is None


def test_pickled_weights_are_refused_by_name(checkpoint):
    copy = checkpoint()
    (copy.path / "model.safetensors").rename(copy.path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: pickled"):
        load(copy.path)


@pytest.mark.parametrize("keep", [0, 5, 3000, -4])
def test_truncated_file(checkpoint, keep):
    copy = checkpoint()
    path = copy.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors .*truncated"):
        load(copy.path)


def test_index_that_names_a_missing_shard(checkpoint):
    copy = checkpoint("qwen3")
    (copy.path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004.safetensors"):
        load(copy.path)


def test_tensor_of_the_index_that_no_shard_holds(checkpoint):
    copy = checkpoint("qwen3")
    index = copy.path / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    where["weight_map"]["model.norm.weight"] = "model-00001-of-00004.safetensors"
    index.write_text(json.dumps(where))
    with pytest.raises(CheckpointError, match=r"missing: model.norm.weight"):
        load(copy.path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_index_that_is_none(checkpoint, text):
    copy = checkpoint("qwen3")
    (copy.path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json"):
        load(copy.path)


def test_stale_shards_beside_an_index_are_ignored(checkpoint, arrays):
    copy = checkpoint("qwen3")
    (copy.path / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    before = arrays(load(GOLDEN / "qwen3").model)
    for path, value in arrays(load(copy.path).model).items():
        np.testing.assert_array_equal(value, before[path])


def test_wrong_paths(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is empty"):
        load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"does not exist.*holds: empty"):
        load(tmp_path / "emtpy")
    with pytest.raises(CheckpointError, match="does not exist"):
        load("no/such/directory/anywhere")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a \.gguf"):
        load(tmp_path / "x.bin")


def test_missing_or_broken_config(checkpoint):
    copy = checkpoint()
    (copy.path / "config.json").write_text("{'single': quotes}")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(copy.path)
    (copy.path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json; found: expected.npz"):
        load(copy.path)


def test_unsupported_model_is_refused_by_name(checkpoint):
    copy = checkpoint()
    copy.edit(model_type="mixtral")
    with pytest.raises(UnsupportedModel, match="'mixtral'"):
        load(copy.path)


def test_hub_id_offline_names_the_ways_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"(?s)owner/name.*--local-dir.*gguf"):
        load("owner/name")


def test_hub_id_fetches_only_what_is_needed(monkeypatch):
    asked = {}

    def snapshot_download(hub_id, *, allow_patterns):
        asked.update(hub_id=hub_id, patterns=allow_patterns)
        return str(GOLDEN / "llama")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load("owner/name").model.config.family == "llama"
    assert asked["hub_id"] == "owner/name"
    assert not any("bin" in pattern for pattern in asked["patterns"])


def test_generation_config_wins_and_ends_may_be_lists(checkpoint):
    copy = checkpoint()
    copy.edit(eos_token_id=7)
    assert load(copy.path).generation.eos_ids == (1, 2)
    copy.edit("generation_config.json", eos_token_id=5, temperature=0.7)
    generation = load(copy.path).generation
    assert generation.eos_ids == (5,)
    assert generation.fields["temperature"] == 0.7
    (copy.path / "generation_config.json").unlink()
    assert load(copy.path).generation.eos_ids == (7,)


@pytest.mark.parametrize("end", ["</s>", 2.0, True, [2, "2"], {"id": 2}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_that_are_no_ids_are_refused(checkpoint, file, end):
    copy = checkpoint()
    copy.edit(file, eos_token_id=end)
    with pytest.raises(CheckpointError, match=f"eos_token_id of {file} must be a token id or a list of them, got "):
        load(copy.path)


def test_the_pad_differs_from_the_end(checkpoint, word_tokenizer):
    copy = checkpoint()
    word_tokenizer().save_pretrained(copy.path)
    copy.edit("generation_config.json", eos_token_id=1, pad_token_id=1)
    copy.edit(pad_token_id=-1)
    generation = load(copy.path).generation
    assert (generation.eos_ids, generation.pad_id) == ((1,), 0)


def test_directory_without_a_tokenizer():
    assert load(GOLDEN / "llama").tokenizer is None


def test_broken_tokenizer(checkpoint):
    copy = checkpoint()
    (copy.path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load(copy.path)
