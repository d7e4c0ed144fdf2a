"""Rows → shuffled, repeated, batched training data whose position can be saved; and evaluation batches.

The order is grain's: a shuffle that is a function of (seed, epoch, index), so a position is one number.
"""

from collections.abc import Iterator
from typing import Any

import grain

from marsjax.data.batch import Batch, BatchFormat, make_batch
from marsjax.data.loading import load_rows as load_rows
from marsjax.data.row_sets import RowSet
from marsjax.data.rows import Row
from marsjax.data.sources import DataError


class TrainBatches:
    """An iterator of full Batches (numpy): shuffled by seed, anew each epoch, `epochs` times (None = for ever).

    Batches run across the edge of an epoch; what is left at the very end and fills no batch is not used.
    """

    def __init__(
        self, rows: RowSet, form: BatchFormat, *, seed: int, epochs: int | None = None, prefetch_rows: int = 512
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
        if epochs is not None and len(rows) * epochs < form.batch_size:
            raise DataError(
                f"{rows.name}: {len(rows)} rows x {epochs} epochs fill no batch of {form.batch_size}; "
                "lower the batch size or raise the epochs"
            )
        self.rows, self.form, self.epochs = rows, form, epochs
        self._identity = {"rows": len(rows), "seed": seed, "fingerprint": rows.fingerprint}
        # One thread: more would only compete for the interpreter, and a single one keeps the tokenizer's use simple.
        reading = grain.ReadOptions(num_threads=1 if prefetch_rows else 0, prefetch_buffer_size=prefetch_rows)
        ordered = grain.MapDataset.source(rows).shuffle(seed).repeat(epochs)
        batched = ordered.to_iter_dataset(reading).batch(
            form.batch_size, drop_remainder=True, batch_fn=lambda found: make_batch(found, form)
        )
        self._iterator = iter(batched)

    @property
    def total_batches(self) -> int | None:
        """Batches in all epochs; None when they have no end."""
        return None if self.epochs is None else len(self.rows) * self.epochs // self.form.batch_size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """The position behind the last batch returned (prefetched rows do not count); JSON can hold it."""
        return {**self._identity, "iterator": self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state. Another data set or seed is refused; another batch size goes on at the next row."""
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise DataError(
                    f"cannot resume the data: the saved position has {name} {state.get(name)}, this run has {here}; "
                    "use the same data, tokenizer, length and seed, or start anew"
                )
        self._iterator.set_state(state["iterator"])

    def close(self) -> None:
        """Ends the prefetching thread."""
        self._iterator.close()


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
