"""Mixtures: several row sets in given proportions, as one row set with a fixed order of (source, row)."""

import math
from collections.abc import Mapping
from typing import Any

from marsjax.data.sources import DataError


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
