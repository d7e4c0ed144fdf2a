"""Tensors of a checkpoint that are not read yet, and how parts of them reach the host memory they are meant for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

CHUNK_BYTES = 32 * 2**20  # what is in flight between file and destination


class CheckpointError(ValueError):
    """The files cannot be loaded; the message lists every reason."""


class Tensor(Protocol):
    """A tensor in a file, one- or two-dimensional."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The safetensors name, such as "BF16"; "F32" for what is dequantised."""
        ...

    def read(self, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows start..stop of the first axis, cut to `columns` of the second where there is one."""
        ...


@dataclass(frozen=True)
class Source:
    """An opened checkpoint of any format: everything but the weights' numbers.

    `tensors` go by Hugging Face names. `hf_config` and `hf_generation` are config.json and generation_config.json (or
    what a GGUF file says in their stead).
    """

    where: str
    tensors: Mapping[str, Tensor]
    tokenizer: Any
    hf_config: dict[str, Any]
    hf_generation: dict[str, Any]


def read_into(out: np.ndarray, tensor: Tensor, index: tuple[slice, ...], transpose: bool) -> None:
    """Fills `out` with `tensor[index]`, casting; index and `out` are in our orientation. Holds one chunk meanwhile."""
    if transpose:
        out, index = out.T, index[::-1]
    start, stop, _ = index[0].indices(tensor.shape[0])
    row_bytes = 4 * int(np.prod(tensor.shape[1:]))
    step = max(1, CHUNK_BYTES // row_bytes)
    for a in range(start, stop, step):
        b = min(a + step, stop)
        out[a - start : b - start] = tensor.read(a, b, *index[1:])


def empty_aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised memory at a multiple of 64 bytes, which jax on a CPU takes over without copying it."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size].view(dtype).reshape(shape)


class MaskRows:
    """An embedding table (or head) with a new row for the mask token, and with as many rows as the plan asks for.

    New rows are the mean of the rows of all known tokens: as input a token without content of its own, as output a
    logit that is the mean of the others, which takes no noticeable part of the softmax.
    """

    def __init__(self, table: Tensor, mask_id: int, rows: int):
        self.table, self.mask_id = table, mask_id
        self.shape = (rows, *table.shape[1:])
        self.dtype = table.dtype
        self._mean: np.ndarray | None = None

    def read(self, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        old_rows = self.table.shape[0]
        if start < old_rows and stop <= min(old_rows, self.mask_id):
            return self.table.read(start, stop, columns)
        rows = np.empty((stop - start, len(range(*columns.indices(self.shape[1])))), np.float32)
        rows[:] = self._mean_row()[columns]
        if start < old_rows:
            end = min(stop, old_rows)
            rows[: end - start] = self.table.read(start, end, columns)
        if start <= self.mask_id < stop:
            rows[self.mask_id - start] = self._mean_row()[columns]
        return rows

    def _mean_row(self) -> np.ndarray:
        if self._mean is None:
            known = min(self.mask_id, self.table.shape[0])
            total = np.zeros(self.shape[1], np.float64)
            step = max(1, CHUNK_BYTES // (4 * self.shape[1]))
            for start in range(0, known, step):
                rows = self.table.read(start, min(start + step, known))
                total += rows.astype(np.float32, copy=False).sum(0, dtype=np.float64)
            self._mean = (total / known).astype(np.float32)
        return self._mean
