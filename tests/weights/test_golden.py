"""Logits and greedy tokens of transformers (tests/golden/make_golden.py), without torch."""

import numpy as np
import pytest

from marsjax.weights import load

from .conftest import GOLDEN

FAMILIES = ["qwen2", "qwen3", "llama"]


@pytest.mark.parametrize("layout", ["list", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family, layout, logits):
    expected = np.load(GOLDEN / family / "expected.npz")
    got = logits(load(GOLDEN / family, layout=layout).model, expected["tokens"])
    error = np.linalg.norm(got - expected["logits"]) / np.linalg.norm(expected["logits"])
    assert error <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family, logits):
    expected = np.load(GOLDEN / family / "expected.npz")["greedy"]
    pretrained = load(GOLDEN / family)
    # Teacher forcing: if every next token is the arg-max behind the expected ones, generation gives the same.
    rows = logits(pretrained.model, expected)[:, 11:-1].copy()
    rows[..., list(pretrained.generation.eos_ids)] = -np.inf  # the reference was told not to end
    np.testing.assert_array_equal(rows.argmax(-1), expected[:, 12:])
