"""What a checkpoint's `config.json` says about the network, and nothing else."""

import dataclasses
from typing import Any, Literal

Family = Literal["qwen2", "qwen3", "llama"]

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


class UnsupportedModel(ValueError):
    """The checkpoint describes a network this package does not compute; the message lists every reason."""


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder; hashable, so that it can be static under `jax.jit`.

    `vocab_size` counts the rows of the embedding table, which may exceed the tokens a tokenizer knows.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 32768
    rope_theta: float = 1e6
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                      "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.family not in ARCHITECTURES:
            raise UnsupportedModel(f"family {self.family!r} is not one of {', '.join(ARCHITECTURES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "ModelConfig":
        """Read a Hugging Face `config.json` (transformers 4 and 5 field names).

        Raises UnsupportedModel naming every field that asks for something this decoder does not compute.
        """
        family = hf.get("model_type")
        if family not in ARCHITECTURES:
            raise UnsupportedModel(
                f"model_type {family!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
                " (dense models only)"
            )
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in required if hf.get(name) is None]:
            raise UnsupportedModel(f"config.json of a {family} model lacks {', '.join(missing)}")
        rope_theta, rope_scaling, problems = _read_rope(hf)
        problems += _unsupported_fields(family, hf)
        if problems:
            raise UnsupportedModel(f"this {family} checkpoint cannot be loaded:\n  " + "\n  ".join(problems))
        heads = hf["num_attention_heads"]
        return cls(
            family=family,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or (128 if family == "qwen3" else hf["hidden_size"] // heads),
            max_positions=hf.get("max_position_embeddings") or (2048 if family == "llama" else 32768),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            initializer_range=float(hf.get("initializer_range", 0.02)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that makes transformers build the same network.

        Rope is written under the names of transformers 4 and of transformers 5, which ignore each other's.
        """
        scaling: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            scaling = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_positions,
            }
        hf = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "initializer_range": self.initializer_range,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})},
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
        }
        if self.family != "llama":
            hf |= {"use_sliding_window": False, "sliding_window": None}
        if self.family != "qwen2":
            hf |= {"attention_bias": False}
        if self.family == "llama":
            hf |= {"mlp_bias": False}
        return hf


def _read_rope(hf: dict[str, Any]) -> tuple[float, Llama3Scaling | None, list[str]]:
    """(theta, scaling, problems). transformers 5 nests theta in `rope_parameters`, 4 keeps it beside `rope_scaling`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None, []
    if kind != "llama3":
        return theta, None, [f"rope type {kind!r} (supported: default, llama3)"]
    rope = {"original_max_position_embeddings": hf.get("original_max_position_embeddings"), **rope}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if rope.get(name) is None]:
        return theta, None, [f"llama3 rope scaling lacks {', '.join(missing)}"]
    factor, low, high, original = (rope[name] for name in names)
    return theta, Llama3Scaling(float(factor), float(low), float(high), int(original)), []


def _unsupported_fields(family: str, hf: dict[str, Any]) -> list[str]:
    problems = []
    layer_types = set(hf.get("layer_types") or [])
    if hf.get("use_sliding_window") or "sliding_attention" in layer_types:
        problems.append(f"sliding window attention (sliding_window={hf.get('sliding_window')})")
    if other := layer_types - {"full_attention", "sliding_attention"}:
        problems.append(f"layer types {', '.join(sorted(other))}")
    if hf.get("num_experts") or hf.get("num_local_experts"):
        problems.append("mixture of experts")
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        problems.append(f"hidden_act {activation!r} (supported: silu)")
    if family != "qwen2" and hf.get("attention_bias"):
        problems.append("attention_bias=true")
    if hf.get("mlp_bias"):
        problems.append("mlp_bias=true")
    if "quantization_config" in hf:
        method = (hf["quantization_config"] or {}).get("quant_method", "unknown method")
        problems.append(f"quantised weights ({method})")
    if (partial := hf.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        problems.append(f"partial_rotary_factor {partial}")
    return problems
