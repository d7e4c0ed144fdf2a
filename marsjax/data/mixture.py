"""Mixtures: several row sets in given proportions, as one row set with a fixed order of (source, row)."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any
from zlib import crc32

import numpy as np

from marsjax.data.row_sets import RowSet, Sizes
from marsjax.data.rows import Row, RowStats
from marsjax.data.sources import DataError

_PARTS = 1_000_000  # weights that are not in the proportion of small whole numbers are rounded to these


class MixedRows:
    """An epoch of several row sets: as many rows as there are before one of them would have to give a row twice.

    At every place of the order, each set has given its share of the rows so far, to less than one row a set: the order
    of grain's `MapDataset.mix` (which rounds weights to about one in a hundred; here they hold). A set
    of which an epoch needs only a part gives rows from all over it, the same in every epoch. `counts`: rows of an epoch
    by source. Sources are ordered by name, so that the order in which a configuration lists them means nothing.
    """

    def __init__(self, sets: Mapping[str, RowSet], weights: Mapping[str, float]):
        self.weights = check_weights(weights)
        names = sorted(self.weights)
        self._sets = [sets[name] for name in names]
        self._shares = _whole_numbers([self.weights[name] for name in names])
        lengths = [len(rows) for rows in self._sets]
        whole = sum(self._shares)
        self._length = min(n * whole // share for n, share in zip(lengths, self._shares, strict=True))
        self._strides = [_stride(n) for n in lengths]
        given = [self._given(self._length)[i] for i in range(len(names))]
        self.counts = {name: int(count) for name, count in zip(names, given, strict=True)}
        self.counted = all(rows.counted for rows in self._sets)
        used = (f"{name} ({self.counts[name]} of {n} rows)" for name, n in zip(names, lengths, strict=True))
        self.name = "mixture of " + ", ".join(used)
        self.stats = RowStats()
        for rows in self._sets:
            self.stats.add(rows.stats)
        self.fingerprint = 0
        for rows, share in zip(self._sets, self._shares, strict=True):
            self.fingerprint = crc32(f"{rows.fingerprint} {len(rows)} {share};".encode(), self.fingerprint)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row | None:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length} of {self.name}")
        source, row = self.locate(index)
        return self._sets[int(source)][int(row)]

    def locate(self, index: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which set, in the order of the names, and which of its rows stand at `index` (any shape, int)."""
        index = np.asarray(index, np.int64)
        before, after = self._given(index), self._given(index + 1)
        source = np.argmax(after != before, axis=0)
        taken = np.take_along_axis(before, source[None], axis=0)[0]
        lengths = np.array([len(rows) for rows in self._sets], np.int64)
        return source, taken * np.array(self._strides)[source] % lengths[source]

    def sizes(self) -> Sizes:
        parts = [rows.sizes() for rows in self._sets]
        source, row = self.locate(np.arange(self._length))
        first_row = np.cumsum([0, *(len(part.tokens) for part in parts)])
        first_span = np.cumsum([0, *(len(part.span_starts) for part in parts)])
        at = first_row[source] + row
        begin = np.concatenate([part.span_offsets[:-1] + n for part, n in zip(parts, first_span, strict=False)])[at]
        count = np.concatenate([np.diff(part.span_offsets) for part in parts])[at]
        offsets = np.concatenate([[0], np.cumsum(count)])
        spans = np.repeat(begin - offsets[:-1], count) + np.arange(offsets[-1])
        return Sizes(
            np.concatenate([part.tokens for part in parts])[at],
            np.concatenate([part.span_starts for part in parts])[spans],
            np.concatenate([part.span_ends for part in parts])[spans],
            offsets,
        )

    def _given(self, count: Any) -> np.ndarray:
        """[sets, ...] int64: the rows each set gives of the first `count`. Each takes its share, rounded up, of what
        those before it leave, so that the sum is exact."""
        rest, whole, given = np.asarray(count, np.int64), sum(self._shares), []
        for share in self._shares:
            left = rest * (whole - share) // whole
            given.append(rest - left)
            rest, whole = left, whole - share
        return np.stack(given)


def _whole_numbers(weights: list[float]) -> list[int]:
    """Whole numbers in the proportion of the weights as they are written, or nearly: sums of them fit int64."""
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(math.gcd(*(f.numerator for f in exact)), math.lcm(*(f.denominator for f in exact)))
    total = sum(exact)
    if total / unit > _PARTS:
        return [max(1, round(f / total * _PARTS)) for f in exact]
    return [int(f / unit) for f in exact]


def _stride(count: int) -> int:
    """A step that visits all of `count` rows once and, stopped early, has been all over them: near the golden section,
    without a factor in common."""
    step = max(1, round(count * 0.6180339887))
    while math.gcd(step, count) > 1:
        step += 1
    return step


def check_weights(weights: Mapping[Any, Any]) -> dict[str, float]:
    """{source: weight} with weights as numbers. Raises DataError naming the source unless all are finite and above 0.

    A number may come as a string: YAML 1.1 reads 5e-6, without a dot, as one.
    """
    if not weights:
        raise DataError("a mixture needs at least one source: {SOURCE: WEIGHT, ...}")
    checked = {}
    for name, value in weights.items():
        if not isinstance(name, str) or not name:
            raise DataError(f"a mixture's source must be a string such as jsonl:PATH, got {name!r}")
        try:
            weight = math.nan if isinstance(value, bool | None) else float(value)
        except (TypeError, ValueError, OverflowError):
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"the weight of {name} must be a number above 0, got {value!r}; leave out what is not used")
        checked[name] = weight
    return checked
