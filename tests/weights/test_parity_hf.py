"""Live comparison with transformers on torch, for machines that have it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live comparison with transformers needs torch; goldens stand in for it")

import jax.numpy as jnp  # noqa: E402
import transformers  # noqa: E402

from marsjax.weights import GenerationDefaults, Pretrained, load, save  # noqa: E402

COMMON = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
          "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
EXTRA = {"qwen2": {}, "qwen3": {"head_dim": 16}, "llama": {"rope_parameters": LLAMA3}}
TOKENS = np.random.default_rng(0).integers(2, 80, (2, 48)).astype(np.int32)


def reference(family, tied, seed=0):
    names = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
    config = getattr(transformers, names[family] + "Config")(**COMMON, **EXTRA[family], tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model = getattr(transformers, names[family] + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_((0.3 if name.endswith(("norm.weight", "bias")) else 0.1) * torch.randn_like(weight))
    return model


def torch_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.float().numpy()


def relative_error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_there_and_back(tmp_path, logits, family, tied):
    model = reference(family, tied)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    ours = load(tmp_path / "hf", layout="stacked")
    assert relative_error(logits(ours.model, TOKENS), torch_logits(model)) <= 1e-5
    save(ours, tmp_path / "out", max_shard_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert again.generation_config.eos_token_id == 1
    known, exported = model.config.to_dict(), again.config.to_dict()
    known.pop("_name_or_path")
    assert {name: exported[name] for name in known} == known


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_model_of_ours_in_transformers(tmp_path, logits, random_model, family):
    model = random_model(family=family, vocab_size=80, tie_embeddings=family == "llama")
    save(Pretrained(model, None, GenerationDefaults((1,), 0)), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative_error(logits(model, TOKENS), torch_logits(theirs)) <= 1e-5


def test_a_masked_export(tmp_path, logits, random_model, word_tokenizer):
    """A grown table loads, and `marsjax` in config.json disturbs nobody."""
    source = Pretrained(random_model(family="llama"), word_tokenizer(40), GenerationDefaults((1,), 0))
    save(source, tmp_path / "source")
    masked = load(tmp_path / "source", with_mask_token=True)
    save(masked, tmp_path / "out", dtype=jnp.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert theirs.get_input_embeddings().weight.shape == (128, 32)
    assert theirs.config.marsjax == {"mask_token_id": 40}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w5 <|mask|> w39")["input_ids"] == [5, 40, 39]
    assert relative_error(logits(load(tmp_path / "out").model, TOKENS), torch_logits(theirs)) <= 1e-5
