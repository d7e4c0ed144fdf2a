"""GGUF files as a `Source`: their tensors under Hugging Face names, their metadata as a config.json."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from marsjax.models import Llama3Scaling, ModelConfig, UnsupportedModel
from marsjax.models.config import ARCHITECTURES
from marsjax.weights.gguf_file import GGUFFile, read_header
from marsjax.weights.gguf_tokenizer import build_tokenizer
from marsjax.weights.names import LAYER_PREFIX
from marsjax.weights.tensors import CheckpointError, Source, Tensor

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def open_file(path: Path) -> Source:
    """Config, tokenizer with chat template, and the tensors, unread, of one GGUF file.

    Raises CheckpointError for damaged files, UnsupportedModel for what this package does not compute.
    """
    file = read_header(path)
    try:
        config = _config(file)
        tokenizer = build_tokenizer(file.metadata, path)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # values of a wrong type trip over something else with every key
        raise CheckpointError(
            f"{path} has damaged metadata ({type(error).__name__}: {error}); fetch it again, or convert it anew"
        ) from error
    ids = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}  # fmt: skip
    return Source(str(path), _tensors(file, config), tokenizer, {**config.to_hf(), **ids}, {})


def _tensors(file: GGUFFile, config: ModelConfig) -> dict[str, Tensor]:
    """Under Hugging Face names; a tensor without one keeps its own, so that the check reports it."""
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
    tensors: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            stem, _, ending = rest.rpartition(".")
            if config.family == "llama" and rest in heads:
                tensor = dataclasses.replace(tensor, order=_half_split_order(heads[rest], tensor.shape[0]))
            known = stem in LAYER and layer.isdigit()
            tensors[LAYER_PREFIX.format(layer) + f"{LAYER[stem]}.{ending}" if known else name] = tensor
        else:
            tensors[OUTER.get(name, name)] = tensor
    return tensors


def _half_split_order(heads: int, rows: int) -> np.ndarray:
    """Where the rows of q and k lie in a llama-type file.

    Such files interleave what rotary embedding turns together (2i, 2i + 1 within a head); Hugging Face keeps the pairs
    half a head apart (i, i + h/2). Other architectures are stored as they are.
    """
    if rows % (2 * heads):  # reported as a wrong shape
        return np.arange(rows)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _config(file: GGUFFile) -> ModelConfig:
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {arch!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{key}", default)

    names = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_rms_epsilon")  # fmt: skip
    problems = [f"the metadata lacks {arch}.{name}" for name in names if get(name) is None]
    problems += [f"the file has no tensor {name}" for name in ("token_embd.weight",) if name not in file.tensors]
    problems += _unsupported(file, get)
    if problems:
        raise UnsupportedModel(f"{file.path} cannot be loaded:\n  " + "\n  ".join(problems))
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim, theta = get("attention.key_length", hidden // heads), float(get("rope.freq_base", 10000.0))
    return ModelConfig(
        family=arch,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=get("context_length", 2048),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_dim, theta, get("rope.scaling.original_context_length")),
        norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
    )


def _unsupported(file: GGUFFile, get: Any) -> list[str]:
    problems = []
    if file.metadata.get("split.count", 1) > 1:
        problems.append(f"one of {file.metadata['split.count']} parts; join them first (llama-gguf-split --merge)")
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(get(name), list):
            problems.append(f"{name} differs from layer to layer")
    if get("expert_count"):
        problems.append(f"mixture of {get('expert_count')} experts")
    if (kind := get("rope.scaling.type", "none")) not in ("none", ""):
        problems.append(f"rope scaling {kind!r} (supported: none, llama3)")
    if get("attention.sliding_window"):
        problems.append(f"sliding window attention ({get('attention.sliding_window')})")
    if problems:
        return problems
    head_dim = get("attention.key_length") or (get("embedding_length") or 0) // (get("attention.head_count") or 1)
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            problems.append(f"{name} {get(name)} differs from the head dimension {head_dim}")
    return problems


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float, original: int | None) -> Llama3Scaling | None:
    """Llama 3.1's scaling, recovered from the factors by which a file divides the frequencies.

    Files hold the factors, not what they were made from; the published models all use 1 and 4 as bounds.
    """
    if ROPE_FACTORS not in file.tensors:
        return None
    tensor = file.tensors[ROPE_FACTORS]
    factors = tensor.read(0, tensor.shape[0]).astype(np.float64)
    if np.allclose(factors, 1.0):
        return None
    freq = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    for positions in dict.fromkeys((original or 8192, 8192)):
        scaling = Llama3Scaling(round(float(factors.max()), 4), 1.0, 4.0, positions)
        keep = np.clip((positions * freq / (2 * np.pi) - 1.0) / 3.0, 0.0, 1.0)
        if len(factors) == len(freq) and np.allclose(factors, 1 / (keep + (1 - keep) / scaling.factor), rtol=1e-4):
            return scaling
    raise UnsupportedModel(
        f"{file.path}: {ROPE_FACTORS} is not llama3 rope scaling (low 1, high 4, original length {original or 8192});"
        " other scalings are not supported"
    )


def _shortest(value: float) -> float:
    """1e-05 for the float32 9.999999747378752e-06, as the model's config.json has it."""
    return float(str(np.float32(value)))
