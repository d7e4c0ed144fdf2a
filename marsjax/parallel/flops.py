"""Floating-point operations of a traced program: of its matrix products, loops counted as often as they run."""

import math
from collections.abc import Callable
from typing import Any

Kernel = Callable[[Any], float]  # of a pallas_call equation


def count(jaxpr: Any, kernel: Kernel = lambda equation: 0.0) -> float:
    """Multiplications and additions of all devices together. Of branches the dearest counts, of `while` loops one run.

    `kernel` says what a Pallas kernel costs, which the program does not tell.
    """
    return _count(getattr(jaxpr, "jaxpr", jaxpr), kernel)


def _count(jaxpr: Any, kernel: Kernel) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contract, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contract)
        elif name == "pallas_call":
            total += kernel(equation)
        elif name == "cond":
            total += max(_count(branch.jaxpr, kernel) for branch in params["branches"])
        else:
            times = params["length"] if name == "scan" else 1
            if name == "shard_map":  # the inner shapes are those of one device
                times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
            total += times * sum(_count(inner, kernel) for inner in _inner(equation))
    return total


def _inner(equation: Any) -> list[Any]:
    """The programs inside an equation, each once."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                found.append(one)
    return found
