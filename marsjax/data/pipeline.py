"""Rows → shuffled, repeated, batched training data whose position is one number; and evaluation batches.

What row i of a run holds is a pure function of (data, seed, i): packing is planned before the first step, and the
order is grain's shuffle, a function of (seed, epoch, index). So the global batch does not depend on the number of
hosts: each makes the rows that lie on its own devices.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import grain
import numpy as np

from marsjax.data.batch import Batch, BatchFormat, make_batch
from marsjax.data.loading import load_rows as load_rows
from marsjax.data.packing import Packing, demand
from marsjax.data.row_sets import RowSet
from marsjax.data.rows import Row
from marsjax.data.sources import DataError

_PARTS = 8  # target rows are rounded up to this part of a row, so that few programs are compiled


class TrainBatches:
    """An iterator of full Batches (numpy): shuffled by seed, anew each epoch, `epochs` times (None = for ever).

    Batches run across the edge of an epoch; what is left at the very end and fills no batch is not used. `target_rows`
    belongs to the batch last returned, and is the same on all hosts: no sequence has more rows in runs with a target.
    `count`: rows of an epoch, packed ones where they are.

    Args:
      packing: of `rows` (`marsjax.data.packing.pack`); None: a document a row.
      target_block: rows with a target are counted in runs of so many (`target_rows`); 1 where there are no blocks.
      local: which rows of each batch to make, ascending; None: all.
      prefetch: batches made ahead by a thread; 0: none, when asked for.
    """

    def __init__(
        self,
        rows: RowSet,
        form: BatchFormat,
        *,
        seed: int,
        epochs: int | None = None,
        packing: Packing | None = None,
        target_block: int | None = None,
        local: Sequence[int] | None = None,
        prefetch: int = 2,
    ):
        if not 0 <= seed < 2**32:
            raise ValueError(f"data seed {seed} is out of range; grain's shuffle takes 0 to 2**32 - 1")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {epochs}")
        if epochs is not None and not rows.counted:
            raise DataError(
                f"{rows.name} has no end, so data.epochs={epochs} has no meaning; give it a count, as in "
                f"{rows.name},count=10000, or give steps instead of epochs"
            )
        if local is not None and not rows.counted:
            raise DataError(
                f"{rows.name} has no count, which a run of several processes needs: {rows.name},count=10000"
            )
        self.rows, self.form, self.epochs, self.packing = rows, form, epochs, packing
        self.count = len(rows) if packing is None else len(packing)
        if epochs is not None and self.count * epochs < form.batch_size:
            raise DataError(
                f"{rows.name}: {self.count} rows x {epochs} epochs fill no batch of {form.batch_size}; "
                "lower the batch size or raise the epochs"
            )
        self.target_block = form.block_size if target_block is None else target_block
        self._local = range(form.batch_size) if local is None else local
        self._prefetch = prefetch
        self._order = grain.MapDataset.range(self.count).shuffle(seed).repeat(epochs)
        self._targets = self._target_rows()
        self._identity = {"rows": self.count, "seed": seed, "fingerprint": rows.fingerprint}
        if packing is not None:
            self._identity["packing"] = crc32(packing.documents.tobytes(), crc32(packing.starts.tobytes()))
        self._go_on_from(0)

    def _target_rows(self) -> np.ndarray | None:
        """[rows] rows in runs with a target; None where they cannot be known before."""
        if not self.rows.counted:
            return None
        block = self.target_block
        of_documents = demand(self.rows.sizes(), block, filled=self.form.filled_block).noisy
        if self.packing is not None:
            of_documents = np.add.reduceat(of_documents[self.packing.documents], self.packing.starts[:-1])
        return of_documents * block

    def _go_on_from(self, row: int) -> None:
        self._row = row
        size = self.form.batch_size
        left = 2**62 if self.epochs is None else max(0, (self.count * self.epochs - row) // size)
        # One thread: more would only compete for the interpreter, and a single one keeps the tokenizer's use simple.
        reading = grain.ReadOptions(num_threads=1 if self._prefetch else 0, prefetch_buffer_size=self._prefetch)
        made = grain.MapDataset.range(left).map(lambda step: self._make(row + step * size)).to_iter_dataset(reading)
        self._iterator = iter(made)

    def _make(self, row: int) -> tuple[Batch, int]:
        batch = make_batch([self._documents(row + i) for i in self._local], self.form, len(self._local))
        if self._targets is None:
            return batch, needed_target_rows(batch, self.target_block)
        needed = max(self._targets[self._order[row + i]] for i in range(self.form.batch_size))
        rounded = rounded_target_rows(int(needed), self.form.length, self.target_block)
        return batch, rounded if self.packing is None else min(rounded, self.packing.noisy_length)

    def _documents(self, row: int) -> list[Row]:
        index = self._order[row]
        if self.packing is not None:
            return [found for document in self.packing[index] if (found := self.rows[int(document)]) is not None]
        for ahead in range(self.count):  # a generated problem that does not fit is replaced by the next that does
            if (found := self.rows[(index + ahead) % self.count]) is not None:
                return [found]
        raise DataError(f"{self.rows.name}: no row fits {self.form.length} tokens")

    @property
    def total_batches(self) -> int | None:
        """Batches in all epochs; None when they have no end."""
        return None if self.epochs is None else self.count * self.epochs // self.form.batch_size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch, self.target_rows = next(self._iterator)
        self._row += self.form.batch_size
        return batch

    def state(self) -> dict[str, Any]:
        """The position behind the last batch returned (prefetched ones do not count); JSON can hold it."""
        return {**self._identity, "row": self._row}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state. Another data set or seed is refused; another batch size goes on at the next row."""
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise DataError(
                    f"cannot resume the data: the saved position has {name} {state.get(name)}, this run has {here}; "
                    "use the same data, tokenizer, length and seed, or start anew"
                )
        if not isinstance(row := state.get("row"), int):
            raise DataError(f"cannot resume the data: the saved position names no row ({state}); start anew")
        self.close()
        self._go_on_from(row)

    def close(self) -> None:
        """Ends the prefetching thread."""
        self._iterator.close()


def needed_target_rows(batch: Batch, block_size: int) -> int:
    """On the host: the rows of a batch's fullest sequence in runs of `block_size` with a target, rounded up."""
    weights = np.asarray(batch.weights).reshape(-1, batch.weights.shape[-1])
    padded = np.pad(weights != 0, ((0, 0), (0, -weights.shape[1] % block_size)))
    needed = padded.reshape(len(padded), -1, block_size).any(-1).sum(-1).max(initial=0) * block_size
    return rounded_target_rows(int(needed), weights.shape[1], block_size)


def rounded_target_rows(needed: int, length: int, block_size: int) -> int:
    """Up to an eighth of the length in whole blocks, and at most the length: few programs to compile."""
    step = max(block_size, length // _PARTS // block_size * block_size)
    return min(length, max(step, -(-needed // step) * step))


def eval_batches(rows: RowSet, form: BatchFormat, limit: int | None = None) -> Iterator[Batch]:
    """The first `limit` rows (None: all) once, in order; the last batch is filled up with padding rows (segment 0,
    weight 0)."""
    found: list[Row] = []
    for index in range(len(rows) if limit is None else min(limit, len(rows))):
        if (row := rows[index]) is not None:
            found.append(row)
        if len(found) == form.batch_size:
            yield make_batch(found, form)
            found = []
    if found:
        yield make_batch(found, form)
