"""The `adapter_config.json` of the PEFT library: what it says of an adapter, as far as the decoder computes it."""

import math
import re
from collections.abc import Callable
from typing import Any

from marsjax.models.config import TARGETS, AdapterConfig
from marsjax.weights.names import MODULES

LORA_TYPE = "LORA"
GATED_TYPE = "MARSJAX_GATED_LORA"  # unknown to PEFT, so that it refuses what it would apply to every token

# Fields without a say in what a trained adapter computes.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
_READ = {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias",
         "init_lora_weights"}  # fmt: skip
_REASONS = {
    "use_dora": "DoRA's magnitudes",
    "rank_pattern": "a rank that differs between linears",
    "alpha_pattern": "an alpha that differs between linears",
    "modules_to_save": "whole modules trained beside the adapter",
    "trainable_token_indices": "rows of the embedding trained beside the adapter",
    "layers_to_transform": "an adapter on some of the layers only",
    "layer_replication": "layers used several times",
    "fan_in_fan_out": "weights stored transposed",
    "lora_bias": "biases inside the adapter",
    "target_parameters": "adapters of parameters that are not linears",
    "alora_invocation_tokens": "an adapter that starts at certain tokens",
}
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that take away from its weights


def to_peft(adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """The fields for an adapter; of a gated one, PEFT and what reads its files must find none to work with."""
    known = {"base_model_name_or_path": base, "task_type": "CAUSAL_LM", "inference_mode": True}
    if adapter.gated:
        return {**known, "peft_type": GATED_TYPE}
    return {
        **known,
        "peft_type": LORA_TYPE,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": [MODULES[name].rsplit(".", 1)[1] for name in adapter.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def from_peft(fields: dict[str, Any], layers: int) -> tuple[dict[str, Any], list[str]]:
    """(rank, alpha and targets for an `AdapterConfig`; why they cannot be had). `layers`: how many have an adapter."""
    problems = []
    if (kind := fields.get("peft_type")) != LORA_TYPE:
        return {}, [f"peft_type {kind!r} (supported: {LORA_TYPE})"]
    if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
        problems.append(f"task_type {task!r} (supported: CAUSAL_LM)")
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    if not (type(rank) is int and rank > 0):
        problems.append(f"r must be a positive integer, got {rank!r}")
    if not (type(alpha) in (int, float) and 0 < alpha < math.inf):
        problems.append(f"lora_alpha must be a positive number, got {alpha!r}")
    if (bias := fields.get("bias", "none")) not in (None, "none"):
        problems.append(f"bias {bias!r}: biases trained beside the adapter")
    if str(start := fields.get("init_lora_weights")).lower().startswith(_CHANGES_THE_BASE):
        problems.append(
            f"init_lora_weights {start!r}: it belongs to a base with other weights than the published one; save it "
            "with path_initial_model_for_weight_conversion"
        )
    for name in sorted(fields.keys() - _HARMLESS - _READ):
        value = fields[name]
        if not (value is None or value is False or value in ([], {}, "")):  # 0 may be a layer
            problems.append(f"{name} {value!r}: {_REASONS.get(name, 'a field whose meaning is not known here')}")
    targets, odd = _targets(fields, layers)
    problems += odd
    if problems:
        return {}, problems
    scale = math.sqrt(rank) if fields.get("use_rslora") else 1  # alpha / sqrt(r) is (alpha sqrt(r)) / r
    return {"rank": rank, "alpha": alpha * scale, "targets": targets}, []


def _targets(fields: dict[str, Any], layers: int) -> tuple[tuple[str, ...], list[str]]:
    """Which linears PEFT's rules pick among those of the decoder, and what else."""
    wanted = fields.get("target_modules")
    try:
        picked, left_out = _matcher(wanted), _matcher(fields.get("exclude_modules") or [])
    except (TypeError, re.error) as error:
        return (), [f"target_modules {wanted!r} must be a list of names or a pattern ({error})"]

    def chosen(module: str) -> bool:
        return picked(module) and not left_out(module)

    counts = {
        name: sum(chosen(f"model.layers.{i}.{module}") for i in range(layers)) for name, module in MODULES.items()
    }
    problems = [
        f"target_modules: {MODULES[name]} of {count} of {layers} layers only (supported: all or none)"
        for name, count in counts.items()
        if 0 < count < layers
    ]
    if not (isinstance(wanted, str) and wanted.lower() == "all-linear"):
        problems += [
            f"target_modules: an adapter of {name}" for name in ("lm_head", "model.embed_tokens") if chosen(name)
        ]
    if not any(counts.values()):
        known = ", ".join(module.rsplit(".", 1)[1] for module in MODULES.values())
        problems.append(f"target_modules {wanted!r} picks none of {known}")
    return tuple(name for name in TARGETS if counts[name]), problems


def _matcher(wanted: Any) -> Callable[[str], bool]:
    if isinstance(wanted, str):
        if wanted.lower() == "all-linear":
            return lambda module: True
        pattern = re.compile(wanted)
        return lambda module: pattern.fullmatch(module) is not None
    if not (isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)):
        raise TypeError(f"it is a {type(wanted).__name__}")
    return lambda module: any(module == name or module.endswith(f".{name}") for name in wanted)
