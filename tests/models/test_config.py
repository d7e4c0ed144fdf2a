import pytest

from marsjax.models import Llama3Scaling, ModelConfig, UnsupportedModel

BASE = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4}  # fmt: skip
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


def test_transformers_4_and_5_say_the_same():
    four = ModelConfig.from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": SCALING})
    five = ModelConfig.from_hf({**BASE, "rope_parameters": {"rope_theta": 5e5, **SCALING}})
    assert four == five
    assert (four.rope_theta, four.rope_scaling) == (5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_default_rope_of_both_versions():
    four = ModelConfig.from_hf({**BASE, "rope_theta": 1e6, "rope_scaling": None})
    five = ModelConfig.from_hf({**BASE, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
    assert four == five
    assert (four.rope_theta, four.rope_scaling) == (1e6, None)


def test_defaults_of_fields_left_out():
    config = ModelConfig.from_hf(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tie_embeddings) == (4, 16, 1e4, False)
    assert ModelConfig.from_hf({**BASE, "head_dim": None, "num_key_value_heads": None}) == config
    assert ModelConfig.from_hf({**BASE, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("scaling", [None, Llama3Scaling(8.0, 1.0, 4.0, 8192)])
def test_round_trip(family, scaling):
    config = ModelConfig(family, 100, 64, 128, 3, 4, 2, 16, 512, 5e5, scaling, 1e-5, False, 0.01)
    assert ModelConfig.from_hf(config.to_hf()) == config
    names = {"rope_theta", "rope_scaling"}  # either version alone is enough
    assert ModelConfig.from_hf({k: v for k, v in config.to_hf().items() if k not in names}) == config
    assert ModelConfig.from_hf({k: v for k, v in config.to_hf().items() if k != "rope_parameters"}) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3'"),
        ({"model_type": "qwen2_moe"}, "'qwen2_moe'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, r"sliding window attention \(sliding_window=4096\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": ["llama"]}, r"\['llama'\]"),
        ({"quantization_config": 4}, r"quantised weights \(quantization_config 4\)"),
        ({"rope_parameters": [1]}, r"rope_parameters must be a mapping, got \[1\]"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be a mapping, got 'llama3'"),
        ({"rope_scaling": SCALING | {"factor": "8x"}}, "rope_scaling.factor must be a positive number, got '8x'"),
        (
            {"rope_scaling": SCALING | {"original_max_position_embeddings": 8e3}},
            "original_max.* must be a positive int",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope parameters of their own for full_attention",
        ),
        ({"rope_theta": "1e6"}, "rope_theta must be a positive number, got '1e6'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer, got 2.0"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"hidden_size": 65}, "hidden_size=65 is not a multiple of num_attention_heads=4"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings must be a positive integer, got 'long'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"initializer_range": "wide"}, "initializer_range must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"layer_types": 3}, "layer_types must be a list of names, got 3"),
    ],
)
def test_refusals_by_name(fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf({**BASE, **fields})


def test_null_is_as_good_as_nothing():
    names = ("rope_parameters", "rope_scaling", "rope_theta", "num_key_value_heads", "head_dim", "initializer_range",
             "max_position_embeddings", "tie_word_embeddings", "layer_types", "quantization_config")  # fmt: skip
    assert ModelConfig.from_hf({**BASE, **dict.fromkeys(names)}) == ModelConfig.from_hf(BASE)


def test_all_refusals_at_once():
    with pytest.raises(UnsupportedModel, match=r"(?s)'yarn'.*'gelu'.*mlp_bias"):
        ModelConfig.from_hf({**BASE, "rope_scaling": {"type": "yarn"}, "hidden_act": "gelu", "mlp_bias": True})


@pytest.mark.parametrize("fields", [{"num_kv_heads": 3}, {"head_dim": 15}, {"num_layers": 0}, {"vocab_size": 1.5},
                                    {"rope_theta": "1e6"}, {"norm_eps": float("inf")}, {"tie_embeddings": "no"},
                                    {"rope_scaling": SCALING}])  # fmt: skip
def test_impossible_shapes(fields):
    shape = {"family": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2,
             "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}  # fmt: skip
    with pytest.raises(ValueError, match=next(iter(fields))):
        ModelConfig(**{**shape, **fields})
