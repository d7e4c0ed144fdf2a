"""Where weights and moments of 0.5B and 7B lie on the supported slices, against tests/golden/shardings.txt."""

import difflib
import importlib.util
import math
from collections import defaultdict
from pathlib import Path

import pytest

from marsjax.attention import splash
from marsjax.parallel.sharding import RULES

GOLDEN = Path(__file__).parents[1] / "golden" / "shardings.py"
PARAMETERS = {"Qwen2.5-0.5B": 494_032_768, "Qwen2.5-7B": 7_615_616_512}  # as their model cards count
BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("golden_shardings", GOLDEN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_as_recorded(golden):
    recorded, now = golden.FILE.read_text(encoding="utf-8").splitlines(), golden.text().splitlines()
    changed = list(difflib.unified_diff(recorded, now, "recorded", "now", lineterm="", n=0))
    assert not changed, "\n".join(
        ["arrays lie elsewhere; if that is meant: python tests/golden/shardings.py, and commit shardings.txt", *changed]
    )


def read(golden):
    """({(model, mesh, kind): [(bytes whole, axes that divide it)]}, {(model, mesh): {kind: bytes of a chip}})"""
    arrays, chips, meshes = defaultdict(list), {}, {}
    for line in golden.FILE.read_text(encoding="utf-8").splitlines():
        depth, words = len(line) - len(line.lstrip()), line.split()
        if depth == 0:
            model, kind, meshes = line, None, defaultdict(list)
        elif depth == 1:
            kind = line.strip()
        elif kind is None:
            letter, *label = words
            meshes[letter].append(" ".join(label))
        elif kind == "bytes of a chip":
            chips[model, " ".join(words[:2])] = {
                k.replace("-", " ", 1): int(n) for k, n in (w.split("=") for w in words[2:])
            }
        else:
            _, dtype, shape, *places = words
            size = BYTES[dtype] * math.prod(int(n) for n in shape.split("x") if n != "scalar")
            for place in places:
                letters, axes = place.split(":")
                along = [axis for entry in axes.split(",") for axis in entry.split("+") if axis not in "-."]
                for label in (label for letter in letters for label in meshes[letter]):
                    arrays[model, label, kind].append((size, along))
    return arrays, chips


def test_bytes_of_a_chip_are_the_sum_over_the_table(golden):
    arrays, chips = read(golden)
    assert len(chips) == 2 * 7 * 3
    for (model, label), kinds in chips.items():
        sizes = {axis: int(n) for axis, n in (part.split("=") for part in label.split()[1].split(","))}
        for kind, held in kinds.items():
            summed = sum(size // math.prod(sizes[axis] for axis in along) for size, along in arrays[model, label, kind])
            assert held == summed, (model, label, kind)
        whole = sum(size for size, _ in arrays[model, label, "parameters"])
        assert whole == 4 * PARAMETERS[model]
        # All but norms and biases is divided, over all chips of a slice.
        parts = sizes["fsdp"] * sizes.get("tensor", 1)
        assert whole / parts <= kinds["parameters"] < 1.011 * whole / parts
        assert kinds["moments float32"] == 2 * kinds["parameters"] + 4
        assert kinds["moments bfloat16"] == 1.5 * kinds["parameters"] + 4
        assert 0.5 * kinds["parameters"] < kinds["moments factored"] < 0.6 * kinds["parameters"]


def test_the_kernel_splits_as_the_rules_do():
    """It lies below the rules table and cannot read it."""
    assert RULES["batch"] == splash.BATCH_AXES
    assert RULES["heads"] == RULES["kv_heads"] == (splash.HEAD_AXIS,)
