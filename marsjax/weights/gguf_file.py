"""The GGUF container: metadata, and tensors that are dequantised when they are read.

The header is parsed here, since the `gguf` package's reader makes several numpy arrays of every token and merge (11
seconds and more than a gigabyte for Qwen2.5's); its tables of types and its dequantisation are used.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marsjax.weights.tensors import CheckpointError

try:
    import gguf
except ImportError as error:
    raise ImportError("reading GGUF files needs the gguf package: pip install 'marsjax[gguf]'") from error

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NATIVE = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor inside a GGUF file, read as float32. `order`, if given, puts its rows into another order."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    order: np.ndarray | None = None
    dtype: str = "F32"

    def read(self, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if len(self.shape) == 1:
            return self._rows(0, 1)[0, start:stop]
        if self.order is None:
            return self._rows(start, stop)[:, columns]
        return self._rows(0, self.shape[0])[self.order[start:stop], columns]

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1])) * self.row_bytes

    def _rows(self, start: int, stop: int) -> np.ndarray:
        raw = np.fromfile(
            self.file, np.uint8, (stop - start) * self.row_bytes, offset=self.offset + start * self.row_bytes
        )
        return gguf.dequantize(raw.reshape(stop - start, self.row_bytes), self.kind)


@dataclass(frozen=True)
class GGUFFile:
    """Metadata by key (numbers, strings, lists) and tensors by GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFFile:
    """Everything of a GGUF file but its numbers. Raises CheckpointError where it is cut short or of another kind."""
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path} ({size} bytes) is too short for a GGUF file; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        magic, version = data[:4], cursor.at(4).scalar("I")
        if magic != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}")
        if version not in (2, 3):
            raise CheckpointError(f"{path} has GGUF version {version}; supported are 2 and 3, little-endian")
        try:
            return _parse(path, cursor, size)
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(
                f"{path} ({size:,} bytes) is truncated or damaged in its header, at byte {cursor.position:,}: {error};"
                " fetch it again"
            ) from error


def _parse(path: Path, cursor: "_Cursor", size: int) -> GGUFFile:
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(num_tensors):
        name, dims = cursor.string(), cursor.scalar("I")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]
        infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors, problems = {}, []
    for name, shape, kind, offset in infos:
        if kind not in iter(gguf.GGMLQuantizationType):
            problems.append(f"{name}: unknown type {kind}")
            continue
        tensor = GGUFTensor(path, start + offset, shape, gguf.GGMLQuantizationType(kind))
        tensors[name] = tensor
        if not _readable(tensor.kind):
            problems.append(f"{name}: type {tensor.kind.name} cannot be dequantised by gguf {_version()}")
        elif shape[-1] % gguf.GGML_QUANT_SIZES[tensor.kind][0]:
            problems.append(f"{name}: {shape[-1]} columns are no multiple of the {tensor.kind.name} block")
        elif tensor.offset + tensor.nbytes > size:
            problems.append(f"{name}: ends at byte {tensor.offset + tensor.nbytes:,}, the file at {size:,} (truncated)")
    if problems:
        raise CheckpointError(f"{path} cannot be read, {len(problems)} problem(s):\n  " + "\n  ".join(problems))
    return GGUFFile(path, metadata, tensors)


def _readable(kind: gguf.GGMLQuantizationType) -> bool:
    if kind.name in NATIVE:
        return True
    block, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return block > 1  # integers and doubles are no weights


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def at(self, position: int) -> "_Cursor":
        self.position = position
        return self

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def take(self, count: int) -> bytes:
        if self.position + count > len(self.data):
            raise IndexError(f"{count:,} bytes wanted, {len(self.data) - self.position:,} left")
        self.position += count
        return self.data[self.position - count : self.position]

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(_code(kind))
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in (STRING, ARRAY):
            return [self.value(kind) for _ in range(count)]
        code = np.dtype("<" + _code(kind))
        return np.frombuffer(self.take(count * code.itemsize), code).tolist()


def _code(kind: int) -> str:
    if kind not in SCALARS:
        raise IndexError(f"unknown value type {kind}")
    return SCALARS[kind]
