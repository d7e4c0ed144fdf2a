"""What a checkpoint's `config.json` says about the network, and nothing else."""

import dataclasses
import math
from collections.abc import Callable
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


TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What is trained beside a frozen decoder (arXiv 2106.09685; gated: arXiv 2507.11851).

    Attributes:
      rank: r of W + (alpha / r) · A B.
      targets: the linears of every layer that have one.
      gated: the adapter acts on mask positions only, so that all others compute what the frozen decoder does.
      masks: embeddings of masks in place of the mask token's row: one for all, or one for each of k; 0: none.
      sampler: a head that predicts behind a mask from its hidden state and the token before.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    gated: bool = True
    masks: int = 0
    sampler: bool = False

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("masks", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"adapter {name} must be an integer of at least {least}, got {value!r}")
        if not (type(self.alpha) in (int, float) and 0 < self.alpha < math.inf):
            raise ValueError(f"adapter alpha must be a positive number, got {self.alpha!r}")
        if not self.targets or any(self.targets.count(x) > 1 or x not in TARGETS for x in self.targets):
            raise ValueError(
                f"adapter targets must be some of {', '.join(TARGETS)}, each once; got {list(self.targets)}"
            )


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
    adapter: AdapterConfig | None = None

    @property
    def own_masks(self) -> int:
        """Embeddings of masks that an adapter brings; 0: masks are the mask token."""
        return self.adapter.masks if self.adapter is not None else 0

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                  "head_dim", "max_positions")  # fmt: skip
        kinds = {**dict.fromkeys(counts, "a positive integer"), "rope_theta": "a positive number",
                 "norm_eps": "a positive number", "initializer_range": "a number",
                 "tie_embeddings": "true or false"}  # fmt: skip
        for field, kind in kinds.items():
            if not _KINDS[kind](value := getattr(self, field)):
                raise ValueError(f"{field} must be {kind}, got {value!r}")
        if not isinstance(self.rope_scaling, Llama3Scaling | None):
            raise ValueError(f"rope_scaling must be a Llama3Scaling, got {self.rope_scaling!r}")
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

        Raises UnsupportedModel naming every field that asks for something this decoder does not compute, or that holds
        what no such field can.
        """
        family = hf.get("model_type")
        if family not in tuple(ARCHITECTURES):  # also where it cannot be hashed
            raise UnsupportedModel(
                f"model_type {family!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
                " (dense models only)"
            )
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in required if hf.get(name) is None]:
            raise UnsupportedModel(f"config.json of a {family} model lacks {', '.join(missing)}")
        if odd := _odd_fields(hf):
            raise UnsupportedModel(f"config.json of this {family} model is damaged:\n  " + "\n  ".join(odd))
        rope_theta, rope_scaling, problems = _read_rope(hf)
        problems += _unsupported_fields(family, hf)
        if problems:
            raise UnsupportedModel(f"this {family} checkpoint cannot be loaded:\n  " + "\n  ".join(problems))
        heads, width = hf["num_attention_heads"], hf["hidden_size"]
        head_dim = hf.get("head_dim") or (128 if family == "qwen3" else None)
        if head_dim is None and width % heads:
            raise UnsupportedModel(
                f"hidden_size={width} is not a multiple of num_attention_heads={heads}, and there is no head_dim"
            )
        return cls(
            family=family,
            vocab_size=hf["vocab_size"],
            hidden_size=width,
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim or width // heads,
            max_positions=hf.get("max_position_embeddings") or (2048 if family == "llama" else 32768),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(hf.get("tie_word_embeddings")),
            initializer_range=0.02 if hf.get("initializer_range") is None else float(hf["initializer_range"]),
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


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive integer": lambda v: type(v) is int and v > 0,
    "a positive number": lambda v: type(v) in (int, float) and 0 < v < math.inf,
    "a number": lambda v: type(v) in (int, float) and math.isfinite(v),
    "true or false": lambda v: isinstance(v, bool),
    "a mapping": lambda v: isinstance(v, dict),
    "a list of names": lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
}
_ROPE = dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), "a positive number")
_ROPE["original_max_position_embeddings"] = "a positive integer"
_FIELDS = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings"),
        "a positive integer",
    ),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), "a positive number"),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"), "true or false"),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), "a mapping"),
    "initializer_range": "a number",
    "layer_types": "a list of names",
}  # fmt: skip


def _odd_fields(hf: dict[str, Any], kinds: dict[str, str] = _FIELDS, where: str = "") -> list[str]:
    """Fields that hold what they cannot; null is as good as nothing, but for the norm's epsilon."""
    odd = []
    for name, kind in kinds.items():
        value: Any = hf.get(name)
        if value is None and not (name == "rms_norm_eps" and name in hf):
            continue
        if not _KINDS[kind](value):
            odd.append(f"{where}{name} must be {kind}, got {value!r}")
        elif kind == "a mapping":
            odd += _odd_fields(value, _ROPE, f"{name}.")
    return odd


def _read_rope(hf: dict[str, Any]) -> tuple[float, Llama3Scaling | None, list[str]]:
    """(theta, scaling, problems). transformers 5 nests theta in `rope_parameters`, 4 keeps it beside `rope_scaling`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        return theta, None, [f"rope parameters of their own for {', '.join(nested)}"]
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
    if (quantised := hf.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        problems.append(f"quantised weights ({method or f'quantization_config {quantised!r}'})")
    if (partial := hf.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        problems.append(f"partial_rotary_factor {partial}")
    return problems
