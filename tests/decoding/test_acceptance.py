import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy

from marsjax.decoding.acceptance import ENTROPY, MARGIN, PROBABILITY, accept, confidence


def run(values, tau, measure):
    return accept(jnp.asarray([values], jnp.float32), jnp.asarray([tau]), jnp.asarray([measure])).tolist()[0]


@pytest.mark.parametrize(
    ("values", "tau", "measure", "accepted"),
    [
        ([0.1, 0.9, 0.9, 0.5], 0.9, PROBABILITY, 3),  # the first always; equality is enough
        ([0.9, 0.5, 0.9, 0.9], 0.9, PROBABILITY, 1),  # nothing behind the first unsure one
        ([1.0, 1.0, 1.0, 1.0], 1.0, PROBABILITY, 1),
        ([1.0, 1.0, 1.0, 1.0], 1.0, MARGIN, 1),
        ([0.0, 0.0, 0.0, 0.0], 0.0, MARGIN, 4),
        ([0.0, 0.0, 0.0, 0.0], 0.0, ENTROPY, 1),
        ([9.0, 0.4, 0.5, 0.6], 0.5, ENTROPY, 3),
        ([9.0, 9.0, 9.0, 9.0], 100.0, ENTROPY, 4),
    ],
)
def test_accepted_run(values, tau, measure, accepted):
    assert run(np.asarray(values, np.float32), np.float32(tau), measure) == accepted


def test_rows_have_their_own_measure():
    logits = np.random.default_rng(0).normal(size=(3, 2, 7)).astype(np.float32) * 2
    logits[:, :, 5] = -np.inf
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    chosen = np.asarray([[0, 1], [2, 3], [4, 6]])
    measured = np.asarray(confidence(jnp.asarray(logits), jnp.asarray(chosen), jnp.arange(3)))
    np.testing.assert_allclose(measured[0], p[0, [0, 1], chosen[0]], rtol=1e-5)
    ranked = np.sort(p, -1)
    np.testing.assert_allclose(measured[1], ranked[1, :, -1] - ranked[1, :, -2], rtol=1e-5)
    np.testing.assert_allclose(measured[2], entropy(p[2], axis=-1), rtol=1e-5)


def test_margin_of_an_exact_tie_is_zero():
    logits = jnp.asarray([[[2.0, 2.0, -jnp.inf]]])
    assert confidence(logits, jnp.zeros((1, 1), int), jnp.asarray([MARGIN])).tolist() == [[0.0]]
