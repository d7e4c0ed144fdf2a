"""From the tensors of a checkpoint to a `Decoder`: the check of the whole, then one parameter after the other."""

from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from marsjax.models import Decoder, ModelConfig, abstract
from marsjax.models.adapters import is_adapter
from marsjax.models.decoder import Layout
from marsjax.parallel.sharding import shardings
from marsjax.weights.names import EMBEDDING, HEAD, Entry, entries
from marsjax.weights.tensors import CheckpointError, Tensor, empty_aligned, read_into

FLOATS = ("F64", "F32", "F16", "BF16")
HARMLESS = ("rotary_emb.inv_freq",)  # buffers that old exports carry; the config says the same


def check(config: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError with every way in which the tensors are not those of such a model."""
    _, params = abstract(config, "stacked")  # one layer stands for all
    wanted = {name: entry.shape for entry in entries(params, config.num_layers) for name in entry.names}
    harmless = {name for name in tensors.keys() - wanted.keys() if name.endswith(HARMLESS) or name == HEAD}
    problems = differences(wanted, tensors, harmless)
    if HEAD in tensors.keys() - wanted.keys() and EMBEDDING in tensors and not _equal(tensors, HEAD, EMBEDDING):
        problems.append(
            f'contradiction: the config says "tie_word_embeddings": true, but {HEAD} differs from {EMBEDDING};'
            " set it to false to use the head, or remove the head"
        )
    if problems:
        raise CheckpointError(
            f"{where} does not hold the weights of this {config.family} model; {len(problems)} problem(s):\n  "
            + "\n  ".join(problems)
        )


def differences(
    wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], harmless: Set[str] = frozenset()
) -> list[str]:
    """How the tensors differ from those that are wanted, but for `harmless` ones, in the order of the layers."""
    problems = []
    for name in wanted.keys() - tensors.keys():
        hint = ""
        if name == HEAD:
            hint = ' (the config says "tie_word_embeddings": false, so the head needs its own weights)'
        problems.append(f"missing: {name} {list(wanted[name])}{hint}")
    for name in tensors.keys() - wanted.keys() - harmless:
        problems.append(f"unexpected: {name} {list(tensors[name].shape)}")
    for name in wanted.keys() & tensors.keys():
        if tuple(tensors[name].shape) != wanted[name]:
            problems.append(f"wrong shape: {name} is {list(tensors[name].shape)}, expected {list(wanted[name])}")
        if tensors[name].dtype not in FLOATS:
            problems.append(f"unsupported dtype: {name} is {tensors[name].dtype}; supported are {', '.join(FLOATS)}")
    return sorted(problems, key=_natural)


def assemble(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    layout: Layout,
    dtype: Any,
    mesh: Mesh | None,
    adapter_dtype: Any = None,
) -> Decoder:
    """A decoder whose weights are read straight to their place: every device reads the slice it holds.

    `tensors` must have passed `check`. The host holds at most one parameter beside those already placed.
    `adapter_dtype`: of an adapter's weights; None: `dtype`.
    """
    graphdef, params = abstract(config, layout, dtype)
    single = SingleDeviceSharding(jax.devices()[0])
    places = dict(shardings(params, mesh).flat_state()) if mesh is not None else {}
    placed = {}
    for entry in entries(params, config.num_layers):
        sharding = places[entry.path].get_raw_value() if mesh is not None else single
        held = adapter_dtype if adapter_dtype is not None and is_adapter(entry.path) else dtype
        placed[entry.path] = entry.variable.replace(_read(entry, tensors, held, sharding))
    return nnx.merge(graphdef, nnx.State.from_flat_path(placed))


def _read(entry: Entry, tensors: Mapping[str, Tensor], dtype: Any, sharding: Any) -> jax.Array:
    shape = entry.variable.get_raw_value().shape
    parts: dict[Any, np.ndarray] = {}  # devices that hold the same slice share one reading

    def part(index: Any) -> np.ndarray:
        bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        if bounds not in parts:
            out = empty_aligned(tuple(stop - start for start, stop in bounds), dtype)
            index = tuple(slice(*bound) for bound in bounds)
            if entry.stacked:
                for row, layer in enumerate(range(*bounds[0])):
                    read_into(out[row], tensors[entry.names[layer]], index[1:], entry.transpose)
            else:
                read_into(out, tensors[entry.names[0]], index, entry.transpose)
            parts[bounds] = out
        return parts[bounds]

    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def _equal(tensors: Mapping[str, Tensor], a: str, b: str) -> bool:
    if tensors[a].shape != tensors[b].shape:
        return False
    rows, step = tensors[a].shape[0], 4096
    return all(
        np.array_equal(tensors[a].read(i, min(i + step, rows)), tensors[b].read(i, min(i + step, rows)))
        for i in range(0, rows, step)
    )


def _natural(problem: str) -> list[Any]:
    """Sorts layer 2 before layer 10."""
    return [part.zfill(8) if part.isdigit() else part for part in problem.replace(".", " ").split()]
