"""The one table of names: our parameter paths ↔ Hugging Face tensor names. Reading and writing both walk it.

Linear weights are [in, out] here and [out, in] there, hence the transposition; everything else has equal shape.
Adapters go by the names that PEFT gives them; mask embeddings and sampler head, which it does not know, by ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx

# ours: (theirs, transposed)
OUTER = {
    "embed_table.embedding": ("model.embed_tokens.weight", False),
    "final_norm.scale": ("model.norm.weight", False),
    "head.kernel": ("lm_head.weight", True),
    "masks.embedding": ("masks.weight", False),
    "sampler.first.kernel": ("sampler.first.weight", True),
    "sampler.first.bias": ("sampler.first.bias", False),
    "sampler.first_norm.scale": ("sampler.first_norm.weight", False),
    "sampler.first_norm.bias": ("sampler.first_norm.bias", False),
    "sampler.second.kernel": ("sampler.second.weight", True),
    "sampler.second.bias": ("sampler.second.bias", False),
    "sampler.second_norm.scale": ("sampler.second_norm.weight", False),
    "sampler.second_norm.bias": ("sampler.second_norm.bias", False),
}
LAYER_PREFIX = "model.layers.{}."
LAYER = {
    "attn_norm.scale": ("input_layernorm.weight", False),
    "attn.q.kernel": ("self_attn.q_proj.weight", True),
    "attn.q.bias": ("self_attn.q_proj.bias", False),
    "attn.k.kernel": ("self_attn.k_proj.weight", True),
    "attn.k.bias": ("self_attn.k_proj.bias", False),
    "attn.v.kernel": ("self_attn.v_proj.weight", True),
    "attn.v.bias": ("self_attn.v_proj.bias", False),
    "attn.o.kernel": ("self_attn.o_proj.weight", True),
    "attn.q_norm.scale": ("self_attn.q_norm.weight", False),
    "attn.k_norm.scale": ("self_attn.k_norm.weight", False),
    "mlp_norm.scale": ("post_attention_layernorm.weight", False),
    "mlp.gate.kernel": ("mlp.gate_proj.weight", True),
    "mlp.up.kernel": ("mlp.up_proj.weight", True),
    "mlp.down.kernel": ("mlp.down_proj.weight", True),
}
EMBEDDING, HEAD = OUTER["embed_table.embedding"][0], OUTER["head.kernel"][0]
ADAPTER_PREFIX = "base_model.model."  # before a model's own names, as PEFT wraps it
LORA = {"a": "lora_A.weight", "b": "lora_B.weight"}
MODULES = {path.split(".")[1]: name.removesuffix(".weight")
           for path, (name, _) in LAYER.items() if path.endswith(".kernel")}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and the tensors of a checkpoint that hold it.

    `names` has one tensor, or, for a parameter of a stacked model, one a layer; `shape` is that of each of them, as
    the checkpoint stores it.
    """

    path: tuple[Any, ...]
    variable: nnx.Variable
    names: tuple[str, ...]
    stacked: bool
    transpose: bool
    shape: tuple[int, ...]


def entries(params: nnx.State, num_layers: int) -> Iterator[Entry]:
    """Every parameter, be it array or abstract, in the order of a checkpoint: embedding, layers, norm, head, and what
    else an adapter has."""
    flat: dict[tuple[Any, ...], nnx.Variable] = dict(params.flat_state())
    order = {name: i for i, name in enumerate(("embed_table", "layers", "final_norm", "head", "masks", "sampler"))}
    for path in sorted(flat, key=lambda path: order[path[0]]):
        shape = flat[path].get_raw_value().shape
        stacked = False
        if path[0] != "layers":
            name, transpose = OUTER[".".join(path)]
            names: tuple[str, ...] = (name,)
        elif isinstance(path[1], int):
            name, transpose = _in_layer(path[2:])
            names = (name.format(path[1]),)
        else:
            name, transpose = _in_layer(path[1:])
            names = tuple(name.format(i) for i in range(num_layers))
            stacked, shape = True, shape[1:]
        yield Entry(path, flat[path], names, stacked, transpose, shape[::-1] if transpose else shape)


def _in_layer(path: tuple[Any, ...]) -> tuple[str, bool]:
    """(name with a place for the layer's number, transposed)."""
    if path[-2] == "adapter":
        return f"{ADAPTER_PREFIX}{LAYER_PREFIX}{MODULES[path[1]]}.{LORA[path[-1]]}", True
    name, transpose = LAYER[".".join(path)]
    return LAYER_PREFIX + name, transpose
