"""Adapter files: a directory with what was trained beside a model, and which model that was.

    adapter_config.json           PEFT's fields
    adapter_model.safetensors     A and B under PEFT's names
    marsjax_adapter.json          what PEFT has no field for: the base's shape, masks, sampler head, how it was trained
    marsjax_adapter.safetensors   mask embeddings and sampler head, if there are any

PEFT and the servers that read its files know no gate, and would apply a gated adapter to every token. So the file with
its A and B, too, is marsjax_adapter.safetensors, its rank, alpha and targets stand in marsjax_adapter.json, and its
`peft_type` is none of PEFT's: there is nothing that those could take for theirs.
"""

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from marsjax.models import Decoder, ModelConfig, abstract
from marsjax.models.adapters import is_adapter
from marsjax.models.config import AdapterConfig
from marsjax.weights import huggingface
from marsjax.weights.assemble import differences
from marsjax.weights.directories import check_target, publish, write_json
from marsjax.weights.names import ADAPTER_PREFIX, LAYER_PREFIX, entries
from marsjax.weights.peft_config import GATED_TYPE, from_peft, to_peft
from marsjax.weights.safetensors_files import Outgoing, about_pickles, open_file, write_file
from marsjax.weights.saving import outgoing, storage_dtype
from marsjax.weights.tensors import CheckpointError, Tensor

PEFT_FIELDS, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OWN_FIELDS, OWN_WEIGHTS = "marsjax_adapter.json", "marsjax_adapter.safetensors"
FILES = (PEFT_FIELDS, PEFT_WEIGHTS, OWN_FIELDS, OWN_WEIGHTS)
VERSION = 1
SHAPE = ("family", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
SHOWN = 8  # tensors named in an error

_WRITTEN = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin)|marsjax_adapter\.(json|safetensors)")
_IN_LAYER = re.compile(re.escape(ADAPTER_PREFIX + LAYER_PREFIX).replace(r"\{\}", r"(\d+)"))


@dataclass(frozen=True)
class AdapterFiles:
    """An opened adapter: everything but the numbers.

    `config` is None where there are `problems`. `base`: the model it was trained beside, as its files name it. `shape`:
    that model's fields, and `norms` its `fingerprint`, where the files say so. `mask_id`: the row of the mask token it
    was trained with, `end_id`: the token behind its answers. `training`: how, such as block_size and objective.
    """

    where: str
    config: AdapterConfig | None
    problems: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    base: str | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    norms: str | None = None
    mask_id: int | None = None
    end_id: int | None = None
    training: dict[str, Any] = field(default_factory=dict)


def save_adapter(
    model: Decoder,
    directory: str | Path,
    *,
    base: str | None,
    mask_id: int | None = None,
    end_id: int | None = None,
    norms: str | None = None,
    trained: dict[str, Any],
    dtype: Any = None,
) -> Path:
    """Writes the adapter of a model, and nothing of the model; returns the directory.

    Args:
      base: path or hub id of the model without the adapter, for those who read the files.
      mask_id: row of the mask token, if the model has one: the base is given it again when the adapter is loaded.
      end_id: the token that ends an answer in the training data; a model with a plain adapter ends with it.
      norms: the `fingerprint` of the model without the adapter; None: of this one, if its weights are there.
      trained: how: block_size, objective and what else JSON can hold.
      dtype: float32, bfloat16 or float16; None: as held.

    Written as `save` does: beside `directory` and renamed at the end; files of an earlier adapter are removed, others
    stay. A plain adapter can be read by PEFT, a gated one cannot. Every process must call this.
    """
    adapter = model.config.adapter
    if adapter is None:
        raise ValueError("this model has no adapter; marsjax.weights.save writes models")
    target = check_target(directory, "adapter", PEFT_FIELDS)
    params = nnx.state(model)
    added = [entry for entry in entries(params, model.config.num_layers) if is_adapter(entry.path)]
    tensors = outgoing(added, storage_dtype(dtype, added[0].variable.get_raw_value().dtype))
    own = {
        "format_version": VERSION,
        "base": {**{name: getattr(model.config, name) for name in SHAPE}, "norms": norms or fingerprint(model)},
        "masks": adapter.masks,
        "sampler": adapter.sampler,
        "mask_token_id": None if mask_id is None else int(mask_id),
        "end_token_id": None if end_id is None else int(end_id),
        "training": {name: value for name, value in trained.items() if name != "mask_token_id"},  # it has its own place
    }
    if adapter.gated:
        own |= {"rank": adapter.rank, "alpha": adapter.alpha, "targets": list(adapter.targets)}
    files: dict[str, list[Outgoing]] = {PEFT_WEIGHTS: [], OWN_WEIGHTS: []}
    for tensor in tensors:
        is_theirs = not adapter.gated and tensor.name.startswith(ADAPTER_PREFIX)
        files[PEFT_WEIGHTS if is_theirs else OWN_WEIGHTS].append(tensor)
    json.dumps(own)  # what it cannot hold is told before anything is written

    def write(work: Path) -> None:
        write_json(work / PEFT_FIELDS, to_peft(adapter, base))
        write_json(work / OWN_FIELDS, own)
        for name, some in files.items():
            if some:
                write_file(work / name, some)

    return publish(target, [tensor for some in files.values() for tensor in some], write, _WRITTEN)


def open_adapter(source: str | Path) -> AdapterFiles:
    """Everything but the numbers of an adapter, ours or PEFT's, from a directory or hub id.

    Raises CheckpointError where files are missing or damaged; what cannot be computed is in `problems`, see `check`.
    """
    directory = huggingface.find(source, FILES, "an adapter")
    names = sorted(path.name for path in directory.iterdir())
    there = f"found: {', '.join(names) or 'nothing'}"
    if PEFT_FIELDS not in names:
        if (directory / "export" / PEFT_FIELDS).is_file():
            there += f"; this looks like a training run, whose adapter is {directory / 'export'}"
        raise CheckpointError(f"{directory} has no {PEFT_FIELDS}, so it is no adapter; {there}")
    fields = huggingface.read_json(directory / PEFT_FIELDS)
    gated, base = fields.get("peft_type") == GATED_TYPE, fields.get("base_model_name_or_path")
    own = huggingface.read_json(directory / OWN_FIELDS) if OWN_FIELDS in names else {}
    extras = own.get("sampler") is True or own.get("masks") not in (None, 0)
    weights = [OWN_WEIGHTS] if gated else [PEFT_WEIGHTS, OWN_WEIGHTS] if extras else [PEFT_WEIGHTS]
    if missing := [name for name in (*weights, *([OWN_FIELDS] if gated else [])) if name not in names]:
        there += about_pickles(names, "PEFT's save_pretrained writes safetensors")
        raise CheckpointError(f"the adapter in {directory} lacks {', '.join(missing)}; {there}")
    tensors = {name: tensor for file in weights for name, tensor in open_file(directory / file).items()}
    layers = 1 + max((int(match[1]) for match in map(_IN_LAYER.match, tensors) if match), default=0)
    gated_basics = {name: own.get(name) for name in ("rank", "alpha", "targets")}
    basics, problems = (gated_basics, []) if gated else from_peft(fields, layers)
    config, odd = _config({**basics, "gated": gated}, own, complete=not problems)
    problems = [f"{PEFT_FIELDS}: {problem}" for problem in problems] + [f"{OWN_FIELDS}: {problem}" for problem in odd]
    shape = {name: value for name, value in (own.get("base") or {}).items() if name in SHAPE} if not odd else {}
    return AdapterFiles(
        where=str(directory),
        config=None if problems else config,
        problems=tuple(problems),
        tensors=tensors,
        base=base if isinstance(base, str) and base else None,
        shape=shape,
        norms=(own.get("base") or {}).get("norms") if not odd else None,
        mask_id=own.get("mask_token_id"),
        end_id=own.get("end_token_id"),
        training=own.get("training") or {},
    )


_ID = (lambda v: v is None or (type(v) is int and v >= 0), "a token id or null")
_OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format_version": (lambda v: v == VERSION, f"{VERSION}; update marsjax to read newer ones"),
    "masks": (lambda v: type(v) is int and v >= 0, "an integer of at least 0"),
    "sampler": (lambda v: isinstance(v, bool), "true or false"),
    **dict.fromkeys(("mask_token_id", "end_token_id"), _ID),
    "base": (lambda v: isinstance(v, dict) and set(SHAPE) <= v.keys(), f"an object with {', '.join(SHAPE)}"),
    "training": (lambda v: isinstance(v, dict), "an object"),
}


def _config(basics: dict[str, Any], own: dict[str, Any], complete: bool) -> tuple[AdapterConfig | None, list[str]]:
    """(the adapter, what is wrong in our own file); `basics` may be of no use."""
    odd = [f"{name} must be {kind}, got {own.get(name)!r}" for name, (good, kind) in _OWN.items()
           if own and not good(own.get(name))]  # fmt: skip
    if not odd and own:
        size = own["training"].get("block_size")
        if size is not None and not (type(size) is int and size > 0):
            odd.append(f"training.block_size must be a positive integer, got {size!r}")
        basics = {**basics, "masks": own["masks"], "sampler": own["sampler"]}
    targets = basics.get("targets", ())
    if not (isinstance(targets, list | tuple) and all(isinstance(name, str) for name in targets)):
        odd.append(f"targets must be a list of names, got {targets!r}")
    if odd or not complete:
        return None, odd
    try:
        return AdapterConfig(**{**basics, "targets": tuple(targets)}), []
    except ValueError as error:
        return None, [str(error)]


def check(adapter: AdapterFiles, config: ModelConfig) -> None:
    """Raises CheckpointError with every reason why the adapter cannot be used beside a model of this shape."""
    problems, ways_out = list(adapter.problems), []
    if any(problem.startswith(PEFT_FIELDS) for problem in problems):
        ways_out.append("merge it with PEFT (merge_and_unload) and load the merged model")
    if any(problem.startswith(OWN_FIELDS) for problem in problems):
        ways_out.append("fetch or export it again")
    others = [f"{name} {value!r}, here {getattr(config, name)!r}"
              for name, value in adapter.shape.items() if getattr(config, name) != value]  # fmt: skip
    found = []
    if others:
        found = [f"it was trained beside another model: {'; '.join(others)}"]
    elif adapter.config is not None:
        params = abstract(dataclasses.replace(config, adapter=adapter.config), "stacked")[1]
        added = [entry for entry in entries(params, config.num_layers) if is_adapter(entry.path)]
        wanted = {name: entry.shape for entry in added for name in entry.names}
        found = differences(wanted, adapter.tensors)
        found = found[:SHOWN] + ([f"and {len(found) - SHOWN} more tensors"] if len(found) > SHOWN else [])
    if found:
        ways_out.append(f"give the model it was trained beside ({adapter.base or 'its files do not name it'})")
    if problems or found:
        raise CheckpointError(
            f"the adapter in {adapter.where} cannot be used beside this {config.family} model; {'; '.join(ways_out)}:"
            "\n  " + "\n  ".join(problems + found)
        )


def check_finite(adapter: AdapterFiles, model: Decoder) -> None:
    """Raises CheckpointError if a number of the adapter is not finite: through attention it would reach every token."""
    for entry in entries(nnx.state(model), model.config.num_layers):
        # On the host: programs for arrays of all these shapes would take longer to compile than everything else here.
        shards = entry.variable.get_raw_value().addressable_shards if is_adapter(entry.path) else ()
        if not all(np.isfinite(np.asarray(shard.data)).all() for shard in shards):
            raise CheckpointError(
                f"the adapter in {adapter.where} is damaged: {entry.names[0]} holds numbers that are not finite; "
                "fetch or export it again"
            )


def warn_of_other_weights(adapter: AdapterFiles, model: Decoder) -> None:
    """Warns if the model has the right shape and other weights than the adapter's base."""
    if adapter.norms is not None and adapter.norms != fingerprint(model):
        gated = adapter.config is not None and adapter.config.gated
        what = "it may foresee less; the text stays the model's own" if gated else "the text may come out as nonsense"
        warnings.warn(
            f"the adapter in {adapter.where} was trained beside other weights of the same shape"
            f"{f' ({adapter.base})' if adapter.base else ''}: {what}",
            stacklevel=4,
        )


def fingerprint(model: Decoder) -> str | None:
    """Of a decoder's own weights, the same in every layout and dtype; None of shapes without weights.

    Only of its norms, in bfloat16: they are few, and quantised files keep them as they are.
    """
    norms: dict[str, Any] = {}
    for entry in entries(nnx.state(model), model.config.num_layers):
        if len(entry.shape) == 1 and entry.names[0].endswith("norm.weight") and not is_adapter(entry.path):
            value = entry.variable.get_raw_value()
            if isinstance(value, jax.ShapeDtypeStruct):
                return None
            value = np.asarray(value)
            norms |= dict(zip(entry.names, value if entry.stacked else [value], strict=True))
    digest = hashlib.sha256()
    for name in sorted(norms):
        digest.update(norms[name].astype(np.float32).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]
