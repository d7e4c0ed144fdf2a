"""Which documents share a row: planned before training, as a pure function of the documents' sizes.

Every document begins at a multiple of the block size in its row (arXiv 2604.07023; so that `position in row // B` is
its block). A row has two capacities: its tokens, and the noisy rows it may need (`Demand.noisy`), so that the noisy
stream has one static length for the whole run.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from marsjax.data.row_sets import Sizes

_TAKEN = 16384  # documents looked at together, the largest placed first
_OPEN = 4096  # rows that stay open for the next ones


class Demand(NamedTuple):
    """What each of n documents takes of a row, in whole blocks; int64 [n]."""

    clean: np.ndarray
    noisy: np.ndarray  # blocks with a target


@dataclass(frozen=True)
class Packing:
    """Row r holds the documents `documents[starts[r]:starts[r + 1]]`, in that order."""

    documents: np.ndarray  # [n] int64
    starts: np.ndarray  # [rows + 1] int64
    tokens: int  # of all documents, blocks not filled up
    length: int  # capacity of a row in tokens
    noisy_length: int  # capacity of a row in noisy rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]

    def __str__(self) -> str:
        return (
            f"packed into {len(self)} rows of {self.length}, {100 * self.efficiency:.1f} % full; noisy rows "
            f"{self.noisy_length} of {self.length}"
        )

    @property
    def efficiency(self) -> float:
        """The share of all rows' positions that hold a token."""
        return self.tokens / (len(self) * self.length)


def demand(sizes: Sizes, block_size: int, filled: int | None = None) -> Demand:
    """Blocks of tokens and blocks with a target. Row t predicts token t + 1: a span [a, b) has targets a-1 to b-2.

    `filled`: answers may be filled up to blocks of so many tokens (`BatchFormat.filled_block`), which counts as if all
    were.
    """
    if filled is not None:
        sizes = sizes._replace(
            tokens=-(-sizes.tokens // filled) * filled, span_ends=-(-sizes.span_ends // filled) * filled
        )
    documents = np.repeat(np.arange(len(sizes.tokens)), np.diff(sizes.span_offsets))
    first = np.maximum(sizes.span_starts.astype(np.int64) - 1, 0) // block_size
    last = (sizes.span_ends.astype(np.int64) - 2) // block_size
    # A block counts once, also where two spans of a document share it.
    previous = np.full(len(first), -1, np.int64)
    previous[1:] = np.where(documents[1:] == documents[:-1], last[:-1], -1)
    blocks = np.maximum(last - np.maximum(first, previous + 1) + 1, 0)
    noisy = np.bincount(documents, blocks, minlength=len(sizes.tokens)).astype(np.int64)
    return Demand(-(-sizes.tokens.astype(np.int64) // block_size), noisy)


def pack(
    sizes: Sizes,
    *,
    length: int,
    block_size: int,
    order: np.ndarray,
    noisy_length: int | None = None,
    filled: int | None = None,
) -> Packing:
    """Packs documents, taken in `order`, into rows of `length` tokens, a multiple of the block size.

    Some thousand documents at a time are placed, the largest first, each where it leaves the least room. Rows with
    room stay open for the next ones. `noisy_length` None: the share of blocks with a target in all data, with some
    room, or what the neediest document takes, up to a 32nd of the length.
    """
    if length % block_size:
        raise ValueError(f"packed rows of {length} tokens are no multiple of block_size={block_size}")
    need = demand(sizes, block_size, filled)
    rows = length // block_size
    if (need.clean > rows).any():
        raise ValueError(f"a document of {int(sizes.tokens.max())} tokens does not fit rows of {length}")
    if noisy_length is None:
        noisy_length = _noisy_length(need, length, block_size)
    limit = noisy_length // block_size
    if (need.noisy > limit).any():
        raise ValueError(
            f"a document needs {int(need.noisy.max()) * block_size} noisy rows, more than noisy_length={noisy_length}"
        )
    room = _Room(rows, limit)
    for begin in range(0, len(order), _TAKEN):
        some = order[begin : begin + _TAKEN]
        size = np.maximum(need.clean[some] / rows, need.noisy[some] / limit)
        for document in some[np.argsort(-size, kind="stable")].tolist():
            room.place(document, int(need.clean[document]), int(need.noisy[document]))
        room.close(_OPEN)
    room.close(0)
    done = room.done
    starts = np.zeros(len(done) + 1, np.int64)
    np.cumsum([len(content) for content in done], out=starts[1:])
    documents = np.array([document for content in done for document in content], np.int64)
    return Packing(documents, starts, int(sizes.tokens[order].sum()), length, noisy_length)


def _noisy_length(need: Demand, length: int, block_size: int) -> int:
    share = need.noisy.sum() / max(need.clean.sum(), 1)
    unit = max(block_size, length // 32 // block_size * block_size)
    wanted = max(share * length * 1.06, int(need.noisy.max(initial=1)) * block_size)
    return min(length, -(-int(np.ceil(wanted)) // unit) * unit)


class _Room:
    """Rows under way: what is left of them, in blocks, and their documents; the fullest go to `done` on `close`."""

    def __init__(self, rows: int, limit: int):
        self.capacity = rows, limit
        self.used = 0
        self.left = np.zeros((2, 1024), np.int64)
        self.contents: list[list[int]] = []
        self.done: list[list[int]] = []

    def place(self, document: int, clean: int, noisy: int) -> None:
        (clean_left, noisy_left), (rows, limit) = self.left[:, : self.used], self.capacity
        # The least room left, of the capacity that has more of it: so that neither runs out long before the other.
        room = np.maximum(clean_left * limit, noisy_left * rows)
        room[(clean_left < clean) | (noisy_left < noisy)] = none = 2 * rows * limit
        slot = int(room.argmin()) if self.used else 0
        if not self.used or room[slot] == none:
            slot = self._open()
        self.left[:, slot] -= clean, noisy
        self.contents[slot].append(document)

    def _open(self) -> int:
        if self.used == self.left.shape[1]:
            self.left = np.concatenate([self.left, np.zeros_like(self.left)], axis=1)
        self.left[:, self.used] = self.capacity
        self.contents.append([])
        self.used += 1
        return self.used - 1

    def close(self, keep: int) -> None:
        """All but the `keep` rows with the most room, and those without any."""
        order = np.argsort(-self.left[0, : self.used], kind="stable")
        kept = np.sort(order[:keep][self.left[0, order[:keep]] > 0])
        closed = np.setdiff1d(np.arange(self.used), kept)
        self.done += [self.contents[slot] for slot in closed]
        self.contents = [self.contents[slot] for slot in kept]
        self.left[:, : len(kept)] = self.left[:, kept]
        self.used = len(kept)
