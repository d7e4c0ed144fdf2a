"""Adapter files: there and back, PEFT's beside ours, and what is refused."""

import dataclasses
import functools
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from marsjax.attention.dense import attend
from marsjax.cli import main
from marsjax.decoding.generator import Generator
from marsjax.models import abstract, adapters, to_list
from marsjax.models.config import TARGETS, AdapterConfig
from marsjax.models.layers import Gate
from marsjax.models.layout import from_params
from marsjax.weights import CheckpointError, GenerationDefaults, Pretrained, convert, load, save, save_adapter

from .conftest import GOLDEN

TRAINED = {"block_size": 4, "objective": "mtp"}
GATED = AdapterConfig(3, 6.0, masks=4, sampler=True)
PLAIN = AdapterConfig(3, 4.5, gated=False)
Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@functools.cache
def adapted(source, adapter, layout="list"):
    """`load(source)` with an adapter of which no number is zero."""
    pretrained, draw = load(source, layout=layout), np.random.default_rng(0)
    config = dataclasses.replace(pretrained.model.config, adapter=adapter)
    shapes = adapters.split(nnx.to_pure_dict(abstract(config, layout)[1]))[1]
    added = jax.tree.map(lambda x: jnp.asarray(0.2 * draw.standard_normal(x.shape, np.float32)), shapes)
    params = adapters.join(nnx.to_pure_dict(nnx.state(pretrained.model)), added)
    return dataclasses.replace(pretrained, model=from_params(config, params, layout))


@pytest.fixture
def written(tmp_path):
    """Writes an adapter beside a golden model: (directory, the model with it)."""

    def make(adapter, source=GOLDEN / "llama", name="adapter", **options):
        pretrained = adapted(source, adapter)
        options = {"base": str(source), "trained": TRAINED, **options}
        return save_adapter(pretrained.model, tmp_path / name, **options), pretrained

    return make


@pytest.fixture
def unread(monkeypatch):
    """Fails where numbers are read, from now on."""
    for adapter in (GATED, PLAIN):
        adapted(GOLDEN / "llama", adapter)

    def read(*_, **__):
        raise AssertionError("read")

    monkeypatch.setattr("marsjax.weights.safetensors_files.FileTensor.read", read)


def edit(directory, file, **fields):
    path = directory / file
    kept = {name: value for name, value in {**json.loads(path.read_text()), **fields}.items() if value is not ...}
    path.write_text(json.dumps(kept))


def edit_weights(directory, file, change):
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)


def assert_equal(arrays, a, b):
    a, b = arrays(to_list(a)), arrays(to_list(b))
    assert a.keys() == b.keys()
    for path, value in a.items():
        np.testing.assert_array_equal(b[path], value, err_msg=str(path))


@pytest.mark.parametrize("layout", ["list", "stacked"])
@pytest.mark.parametrize("adapter", [GATED, PLAIN, AdapterConfig(2, 1, ("o", "gate"), gated=False, masks=1)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_there_and_back(tmp_path, arrays, family, adapter, layout):
    source = GOLDEN / family
    model = adapted(source, adapter, layout).model
    out = save_adapter(model, tmp_path / "a b", base=str(source), trained=TRAINED)
    for other in ("list", "stacked"):
        back = load(source, adapter=out, layout=other)
        assert back.model.layout == other
        assert back.model.config == model.config
        assert_equal(arrays, model, back.model)
    assert back.hf_config["marsjax"] == TRAINED
    assert back.mask_id is None


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("held", [jnp.float32, jnp.bfloat16])
def test_dtypes(written, arrays, stored, held):
    out, source = written(GATED, dtype=stored)
    model = load(GOLDEN / "llama", adapter=out, dtype=held).model
    rounded = {path: value.astype(jnp.dtype(stored)).astype(held) if adapters.is_adapter(path) else value.astype(held)
               for path, value in arrays(source.model).items()}  # fmt: skip
    for path, value in arrays(model).items():
        assert value.dtype == held
        np.testing.assert_array_equal(value, rounded[path])


def test_a_plain_adapter_is_one_of_peft(written, arrays):
    out, source = written(PLAIN)
    tensors, model = load_file(out / "adapter_model.safetensors"), arrays(source.model)
    assert len(tensors) == 3 * len(TARGETS) * 2
    np.testing.assert_array_equal(tensors[Q.format("A")], model["layers", 1, "attn", "q", "adapter", "a"].T)
    np.testing.assert_array_equal(tensors[Q.format("B")], model["layers", 1, "attn", "q", "adapter", "b"].T)
    assert tensors["base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"].shape == (3, 64)
    fields = json.loads((out / "adapter_config.json").read_text())
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 4.5, "target_modules": names,
                "bias": "none", "base_model_name_or_path": str(GOLDEN / "llama")}  # fmt: skip
    assert fields | expected == fields
    assert not (out / "marsjax_adapter.safetensors").exists()


def test_others_find_nothing_in_a_gated_adapter(written):
    """PEFT refuses the type; servers that do not look at it miss the fields and the file they need."""
    out, _ = written(GATED)
    fields = json.loads((out / "adapter_config.json").read_text())
    assert fields["peft_type"] == "MARSJAX_GATED_LORA"
    assert not fields.keys() & {"r", "lora_alpha", "target_modules"}
    names = {"adapter_config.json", "marsjax_adapter.json", "marsjax_adapter.safetensors"}
    assert {path.name for path in out.iterdir()} == names


def test_an_adapter_made_by_peft(logits):
    """tests/golden/make_peft_golden.py: rank-stabilised scale, a pattern of targets, an exclusion."""
    pretrained = load(GOLDEN / "llama", adapter=GOLDEN / "peft")
    assert pretrained.model.config.adapter == AdapterConfig(2, 3 * 2**0.5, ("q", "v", "down"), gated=False)
    tokens = np.load(GOLDEN / "llama/expected.npz")["tokens"][:1]
    expected = np.load(GOLDEN / "peft/expected.npz")["logits"]
    for model in (pretrained.model, adapters.merge(pretrained.model)):
        got = logits(model, tokens)
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= 1e-5
    base = logits(load(GOLDEN / "llama").model, tokens)
    assert np.linalg.norm(base - expected) / np.linalg.norm(expected) > 0.1


@pytest.mark.parametrize(
    ("wanted", "targets"),
    [
        ("all-linear", TARGETS),
        (["q_proj", "mlp.up_proj", "c_attn"], ("q", "up")),
        ([f"model.layers.{i}.self_attn.k_proj" for i in range(3)], ("k",)),
    ],
)
def test_how_targets_are_named(written, wanted, targets):
    out, source = written(AdapterConfig(2, 2, targets, gated=False))
    edit(out, "adapter_config.json", target_modules=wanted)
    assert load(GOLDEN / "llama", adapter=out).model.config == source.model.config


def test_a_peft_adapter_needs_none_of_our_files(written):
    out, source = written(PLAIN)
    (out / "marsjax_adapter.json").unlink()
    back = load(GOLDEN / "llama", adapter=out)
    assert back.model.config == source.model.config
    assert "marsjax" not in back.hf_config


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_merged_weights(written, tmp_path, dtype):
    out, _ = written(PLAIN)
    convert(GOLDEN / "llama", tmp_path / "merged", adapter=out, dtype=dtype)
    before, after = (load_file(path / "model.safetensors") for path in (GOLDEN / "llama", tmp_path / "merged"))
    lora = load_file(out / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        a, b = (lora.get(f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight") for x in "AB")
        expected = value if a is None else value + b @ a * (4.5 / 3)
        if dtype is None:
            np.testing.assert_allclose(after[name], expected, atol=2e-6)
        else:
            base = value.astype(jnp.bfloat16).astype(np.float32)
            expected = base if a is None else base + b @ a * (4.5 / 3)
            np.testing.assert_allclose(after[name].astype(np.float32), expected, rtol=2**-8, atol=1e-6)
    assert json.loads((tmp_path / "merged/config.json").read_text())["marsjax"] == TRAINED


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_transformers_runs_the_merged_model(written, tmp_path, logits, family):
    torch = pytest.importorskip("torch", reason="live comparison with transformers needs torch")
    import transformers

    out, source = written(PLAIN, GOLDEN / family)
    convert(GOLDEN / family, tmp_path / "merged", adapter=out, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    got = logits(source.model, tokens)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= 1e-5


def test_the_embedding_of_masks_becomes_the_row_of_the_mask_token(tmp_path, random_model, word_tokenizer, arrays):
    base = save(Pretrained(random_model(), word_tokenizer(), GenerationDefaults((1,), 0)), tmp_path / "base")
    source = adapted(base, AdapterConfig(2, 2, gated=False, masks=1))
    out = save_adapter(source.model, tmp_path / "adapter", base=str(base), trained=TRAINED)
    assert load(base, adapter=out).mask_id is None
    merged = load(convert(base, tmp_path / "merged", adapter=out))
    assert merged.mask_id == 37
    assert merged.tokenizer.convert_tokens_to_ids("<|mask|>") == 37
    assert merged.hf_config["marsjax"] == {**TRAINED, "mask_token_id": 37}
    row = np.asarray(merged.model.embed_table.embedding[...])[37]
    np.testing.assert_array_equal(row, arrays(source.model)["masks", "embedding"][0])


def test_the_mask_token_of_training_comes_back(tmp_path, random_model, word_tokenizer):
    """An adapter without embeddings for masks was trained with the row that the base was given then."""
    base = save(Pretrained(random_model(), word_tokenizer(), GenerationDefaults((1,), 0)), tmp_path / "base")
    model = adapted(base, PLAIN).model
    out = save_adapter(model, tmp_path / "adapter", base=str(base), mask_id=37, trained=TRAINED)
    back, fresh = load(base, adapter=out), load(base, with_mask_token=True)
    assert back.mask_id == 37
    np.testing.assert_array_equal(back.model.embed_table.embedding[...], fresh.model.embed_table.embedding[...])
    other = save_adapter(model, tmp_path / "other", base=str(base), mask_id=38, trained=TRAINED)
    with pytest.raises(CheckpointError, match=r"trained with mask token 38, but that of .*base is 37"):
        load(base, adapter=other)


def test_the_end_token_of_training(written):
    """It ends the answers of a plain adapter; a gated one leaves them as they are, ends included."""
    base = load(GOLDEN / "llama").generation
    assert base.eos_ids == (1, 2)
    for adapter, ends in ((PLAIN, (7, 1, 2)), (GATED, (1, 2))):
        out, _ = written(adapter, end_id=7)
        assert load(GOLDEN / "llama", adapter=out).generation.eos_ids == ends


def test_frozen_weights_may_be_shapes(written, tmp_path, arrays):
    """As where an adapter comes from a checkpoint, which does not hold its base."""
    _, source = written(PLAIN)
    own, added = adapters.split(nnx.to_pure_dict(nnx.state(source.model)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
    model = from_params(source.model.config, adapters.join(shapes, added), "list")
    trained = {**TRAINED, "mask_token_id": 5}
    out = save_adapter(model, tmp_path / "again", base=None, trained=trained)
    back = load(GOLDEN / "llama", adapter=out)
    assert_equal(arrays, source.model, back.model)
    assert back.hf_config["marsjax"] == TRAINED


def run_with_masks(model, tokens, masks):
    """Hidden states of tokens and, behind them, masks, with the gate open there."""
    length = tokens.shape[1] + masks.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), (len(tokens), length))
    see = positions[:, :, None] >= positions[:, None, :]
    gate = Gate(length, masks.shape[1])
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params):
        model = nnx.merge(graphdef, params)
        rows = jnp.concatenate([model.embed(tokens), masks], 1)
        mix = lambda q, k, v, state: (attend(q, k, v, see), state)  # noqa: E731
        return model(embeddings=rows, positions=positions, attend=mix, gate=gate)[0]

    return np.asarray(run(params))


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_a_gated_adapter_changes_nothing_on_ordinary_positions(written, layout):
    out, _ = written(GATED)
    base, model = load(GOLDEN / "llama", layout=layout).model, load(GOLDEN / "llama", adapter=out, layout=layout).model
    tokens = jnp.asarray(np.load(GOLDEN / "llama/expected.npz")["tokens"][:, :12])
    masks = jnp.broadcast_to(model.masks(jnp.arange(4), jnp.float32), (2, 4, 48))
    plain, with_adapter = (run_with_masks(each, tokens, masks) for each in (base, model))
    np.testing.assert_array_equal(with_adapter[:, :12], plain[:, :12])
    assert np.abs(with_adapter[:, 12:] - plain[:, 12:]).max(-1).min() > 0.01


def test_a_mesh(written, subprocess_python):
    out, _ = written(GATED, GOLDEN / "qwen3")
    plain, _ = written(AdapterConfig(4, 4, gated=False), GOLDEN / "qwen3", name="plain")
    subprocess_python(
        f"""
        import numpy as np
        from flax import nnx
        from marsjax.parallel.sharding import make_mesh, shardings
        from marsjax.weights import load, save_adapter
        mesh = make_mesh(fsdp=2, tensor=2)
        for adapter in ({str(out)!r}, {str(plain)!r}):
            for layout in ("list", "stacked"):
                whole = load({str(GOLDEN / "qwen3")!r}, adapter=adapter, layout=layout)
                spread = load({str(GOLDEN / "qwen3")!r}, adapter=adapter, layout=layout, mesh=mesh)
                a, b = (dict(nnx.state(p.model).flat_state()) for p in (whole, spread))
                places = dict(shardings(nnx.state(spread.model), mesh).flat_state())
                for key in a:
                    assert b[key][...].sharding == places[key].get_raw_value(), key
                    np.testing.assert_array_equal(np.asarray(a[key][...]), np.asarray(b[key][...]))
                down = [v[...] for k, v in b.items() if k[-4:] == ("mlp", "down", "adapter", "a")][0]
                assert down.addressable_shards[0].data.shape[-2:] == (40, down.shape[-1])
                save_adapter(spread.model, adapter + "-again", base=None, trained={{}})
                again = load({str(GOLDEN / "qwen3")!r}, adapter=adapter + "-again", layout=layout)
                for key, value in nnx.state(again.model).flat_state():
                    np.testing.assert_array_equal(np.asarray(a[key][...]), np.asarray(value[...]))
        """
    )


def test_shapes_without_weights(written, unread):
    out, source = written(GATED)
    shapes = load(GOLDEN / "llama", adapter=out, weights=False).model
    got, wanted = (nnx.state(model).flat_state() for model in (shapes, source.model))
    assert {path: value.get_raw_value().shape for path, value in got} == {
        path: value.get_raw_value().shape for path, value in wanted
    }


REFUSED = [
    ({"use_dora": True}, "use_dora True: DoRA"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern .* a rank that differs"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern .* an alpha that differs"),
    ({"bias": "all"}, "bias 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save .* whole modules"),
    ({"layers_to_transform": [0]}, "layers_to_transform .* some of the layers"),
    ({"layers_to_transform": 0}, "layers_to_transform 0: an adapter on some of the layers"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out True: weights stored transposed"),
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"peft_type": ...}, "peft_type None"),
    ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
    ({"use_magic": 1}, "use_magic 1: a field whose meaning is not known here"),
    ({"r": 0}, "r must be a positive integer, got 0"),
    ({"r": "8"}, "r must be a positive integer, got '8'"),
    ({"lora_alpha": None}, "lora_alpha must be a positive number, got None"),
    ({"target_modules": None}, "target_modules None must be a list of names or a pattern"),
    ({"target_modules": "(q"}, "target_modules '\\(q' must be a list of names or a pattern"),
    ({"target_modules": ["c_attn"]}, "picks none of q_proj"),
    ({"target_modules": ["q_proj", "lm_head"]}, "an adapter of lm_head"),
    ({"target_modules": r".*layers\.[01]\..*proj"}, "target_modules: self_attn.q_proj of 2 of 3 layers only"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_of_peft_is_refused(written, unread, fields, reason):
    out, _ = written(PLAIN)
    edit(out, "adapter_config.json", **fields)
    with pytest.raises(CheckpointError, match=f"(?s)merge it with PEFT.*adapter_config.json: .*{reason}"):
        load(GOLDEN / "llama", adapter=out)


def test_harmless_fields_of_peft(written):
    out, source = written(PLAIN)
    edit(out, "adapter_config.json", peft_version="0.21.2", lora_dropout=0.1, qalora_group_size=16, loftq_config={},
         init_lora_weights="gaussian", megatron_core="megatron.core", revision="main", auto_mapping={"a": "b"},
         layers_to_transform=None, task_type=None)  # fmt: skip
    assert load(GOLDEN / "llama", adapter=out).model.config == source.model.config


def test_all_problems_in_one_report(written, unread):
    out, _ = written(PLAIN)
    edit(out, "adapter_config.json", use_dora=True, bias="all")
    edit(out, "marsjax_adapter.json", sampler=0, training=3)
    with pytest.raises(CheckpointError) as error:
        load(GOLDEN / "llama", adapter=out)
    wanted = ("use_dora", "bias 'all'", "marsjax_adapter.json: sampler must be", "training must be an object, got 3",
              "merge it with PEFT (merge_and_unload) and load the merged model; fetch or export it again")  # fmt: skip
    assert [text for text in wanted if text not in str(error.value)] == []


@pytest.mark.parametrize("adapter", [GATED, PLAIN])
def test_the_wrong_base(written, unread, adapter):
    out, _ = written(adapter)
    with pytest.raises(CheckpointError) as error:
        load(GOLDEN / "qwen2", adapter=out)
    text = str(error.value)
    assert "beside this qwen2 model" in text
    assert "family 'llama', here 'qwen2'" in text
    assert "num_layers 3, here 2" in text
    assert f"give the model it was trained beside ({GOLDEN / 'llama'})" in text


def test_the_wrong_base_of_a_peft_adapter(unread):
    """PEFT's files do not say what the base looks like: the tensors do."""
    with pytest.raises(CheckpointError) as error:
        load(GOLDEN / "qwen2", adapter=GOLDEN / "peft")
    text = str(error.value)
    assert (
        "wrong shape: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight is [2, 64], expected [2, 80]" in text
    )
    assert "unexpected: base_model.model.model.layers.2.mlp.down_proj.lora_A.weight" in text
    assert "give the model it was trained beside (llama)" in text


def test_other_weights_of_the_same_shape_warn(written, checkpoint):
    out, _ = written(PLAIN)
    copy = checkpoint()
    weights = copy.weights
    copy.weights = {name: value.astype(jnp.bfloat16) for name, value in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(copy.path, adapter=out, dtype=jnp.float16)
    copy.weights = weights | {"model.norm.weight": weights["model.norm.weight"] * 1.1}
    with pytest.warns(UserWarning, match=r"trained beside other weights of the same shape \(.*llama\)"):
        load(copy.path, adapter=out)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def drop(path):
    path.unlink()


def point(path):
    path.write_text("version https://git-lfs.github.com/spec/v1")


def pickle(path):
    path.rename(path.with_name("adapter_model.bin"))


@pytest.mark.parametrize(
    ("adapter", "file", "damage", "message"),
    [
        (GATED, "marsjax_adapter.safetensors", cut, "marsjax_adapter.safetensors .* is truncated"),
        (PLAIN, "adapter_model.safetensors", cut, "adapter_model.safetensors .* is truncated"),
        (PLAIN, "adapter_model.safetensors", point, "adapter_model.safetensors .* git-lfs pointer"),
        (PLAIN, "adapter_model.safetensors", drop, "lacks adapter_model.safetensors; found: adapter_config.json"),
        (PLAIN, "adapter_model.safetensors", pickle, "adapter_model.bin: pickled weights are never opened"),
        (GATED, "marsjax_adapter.json", drop, "lacks marsjax_adapter.json"),
        (GATED, "marsjax_adapter.safetensors", drop, "lacks marsjax_adapter.safetensors"),
        (dataclasses.replace(PLAIN, masks=1), "marsjax_adapter.safetensors", drop, "lacks marsjax_adapter.safetensors"),
        (GATED, "adapter_config.json", drop, "has no adapter_config.json, so it is no adapter"),
        (GATED, "adapter_config.json", point, "adapter_config.json is not valid JSON"),
    ],
)
def test_damaged_files(written, adapter, file, damage, message):
    out, _ = written(adapter)
    damage(out / file)
    with pytest.raises(CheckpointError, match=message):
        load(GOLDEN / "llama", adapter=out)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite(written, number):
    out, _ = written(PLAIN)
    edit_weights(out, "adapter_model.safetensors", lambda t: t.update({Q.format("B"): np.full((48, 3), number, "f")}))
    with pytest.raises(
        CheckpointError, match=r"layers.*self_attn.q_proj.lora_B.weight holds numbers that are not finite"
    ):
        load(GOLDEN / "llama", adapter=out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q.format("A")), "missing: .*layers.1.self_attn.q_proj.lora_A.weight \\[3, 48\\]"),
        (lambda t: t.update({"base_model.model.lm_head.weight": np.zeros((96, 48))}), "unexpected: .*lm_head.weight"),
        (lambda t: t.update({Q.format("B"): np.zeros((48, 2), "f")}), "wrong shape: .*lora_B.weight is \\[48, 2\\]"),
        (lambda t: t.update({Q.format("B"): np.zeros((48, 3), "i1")}), "unsupported dtype: .*lora_B.weight is I8"),
        (dict.clear, "and 34 more tensors"),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "empty"],
)
def test_damaged_tensors(written, unread, change, message):
    out, _ = written(PLAIN)
    edit_weights(out, "adapter_model.safetensors", change)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load(GOLDEN / "llama", adapter=out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": 2}, "format_version must be 1; update marsjax .* got 2"),
        ({"masks": "4"}, "masks must be an integer of at least 0, got '4'"),
        ({"sampler": 1}, "sampler must be true or false, got 1"),
        ({"mask_token_id": -1}, "mask_token_id must be a token id or null, got -1"),
        ({"base": {"hidden_size": 48}}, "base must be an object with family, hidden_size"),
        ({"base": []}, "base must be an object with family, hidden_size"),
        ({"training": ...}, "training must be an object, got None"),
        ({"training": {"block_size": "4"}}, "training.block_size must be a positive integer, got '4'"),
        ({"rank": ...}, "adapter rank must be an integer of at least 1, got None"),
        ({"alpha": 0}, "adapter alpha must be a positive number, got 0"),
        ({"targets": ["q", "x"]}, r"adapter targets must be some of q, .*; got \['q', 'x'\]"),
        ({"targets": None}, "targets must be a list of names, got None"),
        ({"targets": [["q"]]}, r"targets must be a list of names, got \[\['q'\]\]"),
    ],
    ids=str,
)
def test_damaged_fields_of_ours(written, unread, fields, message):
    out, _ = written(GATED)
    edit(out, "marsjax_adapter.json", **fields)
    with pytest.raises(CheckpointError, match=f"(?s)marsjax_adapter.json: {message}"):
        load(GOLDEN / "llama", adapter=out)


def test_no_directory(tmp_path, unread):
    with pytest.raises(CheckpointError, match="nowhere' does not exist; expected a directory or a hub id"):
        load(GOLDEN / "llama", adapter=tmp_path / "nowhere")
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/export/adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"looks like a training run, whose adapter is .*run/export"):
        load(GOLDEN / "llama", adapter=tmp_path / "run")


def test_a_misspelt_path_like_a_hub_id_says_what_is_there(tmp_path, unread, monkeypatch):
    (tmp_path / "runs/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"nor an adapter that can be fetched \(runs holds: mine\)"):
        load(GOLDEN / "llama", adapter="runs/mien")


def test_a_wrong_hub_model_is_not_fetched(written, monkeypatch, tmp_path):
    out, _ = written(PLAIN)
    small = tmp_path / "small"
    small.mkdir()
    shutil.copy(GOLDEN / "qwen2/config.json", small)
    asked = []
    monkeypatch.setattr("marsjax.weights.huggingface.download", lambda _, files: asked.append(files) or small)
    for call in (load, lambda source, adapter: convert(source, tmp_path / "out", adapter=adapter)):
        with pytest.raises(CheckpointError, match="family 'llama', here 'qwen2'"):
            call("someone/qwen2", adapter=out)
    assert not any("*.safetensors" in files for files in asked)


def test_a_model_with_an_adapter_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match=r"it is gated, and acts on masks only.*save_adapter writes the adapter alone"):
        save(adapted(GOLDEN / "llama", GATED), tmp_path / "out")
    with pytest.raises(ValueError, match=r"merge it first .*marsjax convert BASE OUT --adapter DIR"):
        save(adapted(GOLDEN / "llama", PLAIN), tmp_path / "out")
    with pytest.raises(ValueError, match="this model has no adapter"):
        save_adapter(load(GOLDEN / "llama").model, tmp_path / "out", base=None, trained={})
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_replaces_an_older_one(written, tmp_path):
    out, _ = written(dataclasses.replace(PLAIN, masks=1))
    for mine in ("README.md", "tokenizer.json"):
        (out / mine).write_text("mine")
    (out / "adapter_model.bin").write_text("stale")
    written(GATED)
    assert {path.name for path in out.iterdir()} == {
        "README.md", "tokenizer.json", "adapter_config.json", "marsjax_adapter.json", "marsjax_adapter.safetensors",
    }  # fmt: skip
    assert load(GOLDEN / "llama", adapter=out).model.config.adapter == GATED
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_crash_leaves_the_old_adapter(written, tmp_path, monkeypatch):
    out, _ = written(PLAIN)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("marsjax.weights.adapters.write_file", fail)
    for name in ("adapter", "new"):
        with pytest.raises(OSError, match="disk full"):
            written(GATED, name=name)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_refusals_come_before_writing(written, tmp_path, checkpoint):
    full = checkpoint().path
    for name, options, error, reason in (
        ("llama", {}, FileExistsError, "holds other things than an adapter .*no adapter_config.json"),
        ("new", {"dtype": jnp.int8}, ValueError, "cannot export as int8"),
        ("new", {"trained": {"block_size": np.int32(4)}}, TypeError, "not JSON serializable"),
    ):
        with pytest.raises(error, match=reason):
            written(PLAIN, name=name, **options)
    assert (full / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_generator_with_a_gated_adapter(written):
    """Generates what transformers does without it, and knows how the adapter was trained."""
    out, _ = written(GATED)
    expected = np.load(GOLDEN / "llama/expected.npz")["greedy"]
    # The reference was told not to end.
    generator = Generator.load(GOLDEN / "llama", adapter=out, strategy="ar", forbidden=(1, 2))
    assert (generator._target.block_size, generator._target.objective) == (4, "mtp")
    results = generator.generate(expected[:, :12].tolist(), max_new_tokens=24)
    assert [result.ids for result in results] == expected[:, 12:].tolist()


def test_the_command_line(written, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("marsjax.cli._keep_compiled_programs", lambda: None)
    gated, _ = written(GATED)
    plain, _ = written(PLAIN, name="plain")
    base = str(GOLDEN / "llama")
    assert main(["convert", base, str(tmp_path / "merged"), "--adapter", str(plain)]) == 0
    assert (tmp_path / "merged/model.safetensors").is_file()
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out"), "--adapter", str(gated)]) == 1
    assert "it is gated, and acts on masks only" in capsys.readouterr().err
    for command in (["generate", "--prompt", "x"], ["convert", str(tmp_path / "out")]):
        model = ["--model", str(plain)] if command[0] == "generate" else [str(plain)]
        assert main([command[0], *model, *command[1:]]) == 1
        assert f"is an adapter, not a model; load it beside the model it was trained for: --model {base}" in (
            capsys.readouterr().err
        )
    assert not (tmp_path / "out").exists()
    requests = tmp_path / "requests.jsonl"
    body = {"prompt": "w5", "max_tokens": 2}
    requests.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}) + "\n")
    assert main(["batch", str(requests), str(tmp_path / "o.jsonl"), "--model", base, "--adapter", base]) == 1
    assert "has no adapter_config.json, so it is no adapter" in capsys.readouterr().err
    assert main(["generate", "--model", base, "--adapter", base, "--prompt", "x"]) == 1
    assert "has no adapter_config.json, so it is no adapter" in capsys.readouterr().err
