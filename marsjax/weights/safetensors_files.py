"""Safetensors: reading slices of one file or of shards with an index, writing without holding a file in memory."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from marsjax.weights.tensors import CHUNK_BYTES, CheckpointError, Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float64): "F64",
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor inside a safetensors file. The file is opened anew for each reading: safetensors maps it into memory,
    and pages once touched count as resident until it is closed."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        with safe_open(self.file, framework="numpy") as opened:
            part = opened.get_slice(self.name)
            return part[start:stop] if len(self.shape) == 1 else part[start:stop, columns]


def open_directory(directory: Path) -> Mapping[str, Tensor]:
    """Every tensor of the checkpoint in `directory`, unread.

    With an index, the shards it names and no other file; else model.safetensors. Raises CheckpointError for files
    that are missing, truncated or of another format, naming what is there.
    """
    if (directory / INDEX).is_file():
        return _open_shards(directory)
    if (directory / SINGLE).is_file():
        return open_file(directory / SINGLE)
    found = sorted(path.name for path in directory.iterdir())
    if not found:
        raise CheckpointError(f"{directory} is empty; expected config.json and {SINGLE}")
    reason = f"found: {', '.join(found)}"
    if (directory / "export" / "config.json").is_file():
        reason += f"; this looks like a training run, whose model is {directory / 'export'}"
    reason += about_pickles(found, "convert them with transformers (model.save_pretrained writes safetensors)")
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; {reason}")


def about_pickles(names: Sequence[str], way_out: str) -> str:
    """What to say of pickled weights among files, behind other words; "" where there are none."""
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    told = f". {', '.join(pickled)}: pickled weights are never opened, since unpickling runs code; {way_out}"
    return told if pickled else ""


def _open_shards(directory: Path) -> dict[str, Tensor]:
    path = directory / INDEX
    try:
        where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(where.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index (no weight_map): {error!r}") from error
    if outside := [shard for shard in shards if not isinstance(shard, str) or Path(shard).name != shard]:
        raise CheckpointError(f"{path} names shards outside its directory: {', '.join(map(str, outside))}")
    if missing := [shard for shard in shards if not (directory / shard).is_file()]:
        raise CheckpointError(
            f"{path} names {len(shards)} shards, of which {len(missing)} are not there: {', '.join(missing)};"
            " the download is incomplete, fetch them again"
        )
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        inside = open_file(directory / shard)
        tensors |= {name: tensor for name, tensor in inside.items() if where.get(name, shard) == shard}
    return tensors


def open_file(path: Path) -> dict[str, Tensor]:
    """Every tensor of one file, unread. Raises CheckpointError for what is no such file or a part of one."""
    try:
        with safe_open(path, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: FileTensor(path, name, tuple(p.get_shape()), p.get_dtype()) for name, p in parts.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size:,} bytes) is truncated or not a safetensors file: {error};"
            " fetch it again (a file of some hundred bytes is often a git-lfs pointer)"
        ) from error


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write: `rows` makes the array only when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    value: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write_directory(directory: Path, tensors: Sequence[Outgoing], max_shard_bytes: float) -> None:
    """One model.safetensors, or shards of at most `max_shard_bytes` (or one tensor) each, with their index."""
    shards: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_file(directory / SINGLE, shards[0])
        return
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard)
        where |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_file(path: Path, tensors: Sequence[Outgoing]) -> None:
    """One file of these tensors, made and written one after the other."""
    # The library's own writer wants all arrays of a file at once; the format is a header and the bytes in order.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers 4 insists on the metadata
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            value = tensor.value()
            assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
            step = max(1, CHUNK_BYTES * len(value) // max(1, value.nbytes))
            for i in range(0, len(value), step):
                file.write(np.ascontiguousarray(value[i : i + step], tensor.dtype).tobytes())
