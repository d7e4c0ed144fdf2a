import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.data.batch import Batch
from marsjax.models import ModelConfig, abstract
from marsjax.training.losses import score_rows
from marsjax.training.objectives import Forward, mars
from marsjax.training.state import rebuild

N, S, D, V = 3, 11, 8, 50


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(N, S, D)).astype(np.float32)
    table = rng.normal(size=(V, D)).astype(np.float32)
    return hidden, table, rng.integers(0, V, (N, S)), rng.random((N, S)) < 0.4


def scores(hidden, table, targets, wanted, chunk_bytes):
    weights = jnp.ones((N, S))
    return score_rows(table, 0, hidden, targets, jnp.asarray(wanted), weights, chunk_bytes=chunk_bytes)[1]


@pytest.mark.parametrize("columns", [1, 2, 5, 11, 100])
def test_scores_of_every_chunk_size(arrays, columns):
    hidden, table, targets, wanted = arrays
    got = jax.jit(scores, static_argnums=4)(*arrays, columns * 4 * N * V)
    for n in range(N):
        for s in range(S):
            logits = hidden[n, s].astype(np.float64) @ table.T.astype(np.float64)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            expected = (
                (-np.log(p[targets[n, s]]), logits.argmax() == targets[n, s], p.max()) if wanted[n, s] else [0] * 3
            )
            np.testing.assert_allclose([x[n, s] for x in got], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("columns", [2, 5, 100])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_sum_and_gradients_equal_those_of_plain_logits(arrays, columns, vocab_axis):
    """Against jax's own derivative of the loss written down."""
    weight = np.random.default_rng(1).random((N, S)).astype(np.float32)
    hidden, table, targets, wanted = arrays

    def ours(hidden, table):
        kernel = table if vocab_axis == 0 else table.T
        rest = (hidden, targets, jnp.asarray(wanted), jnp.asarray(weight))
        return 3 * score_rows(kernel, vocab_axis, *rest, chunk_bytes=columns * 4 * N * V)[0]

    def plain(hidden, table):
        log_p = jax.nn.log_softmax(hidden @ table.T)
        return -3 * (weight * wanted * jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]).sum()

    got, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, table) for f in (ours, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _sizes(inner)


def test_no_logits_of_the_whole_batch():
    """Qwen2.5-0.5B's vocabulary, 4 x (512 + 512) rows, forward and backward, default budget: shapes of the program."""
    config = ModelConfig("qwen2", 151936, 896, 4864, 2, 14, 2, 64)
    params = nnx.to_pure_dict(abstract(config)[1])
    n, length = 4, 512
    integers, floats = (jax.ShapeDtypeStruct((n, length), t) for t in (jnp.int32, jnp.float32))
    batch = Batch(*[integers] * 5, floats, integers, jax.ShapeDtypeStruct((n,), jnp.float32))

    def loss(params, batch):
        return mars(rebuild(config, params), batch, block_size=4, forward=Forward()).numerator

    shapes = set(_sizes(jax.make_jaxpr(jax.grad(loss))(params, batch).jaxpr))
    with_vocabulary = [s for s in shapes if config.vocab_size in s and s != (config.vocab_size, config.hidden_size)]
    assert with_vocabulary  # the walk does see the chunks
    assert max(np.prod(s) for s in with_vocabulary) * 4 <= 256 * 2**20
    assert max(np.prod(s) for s in with_vocabulary) * 8 < n * 2 * length * config.vocab_size
