"""Dense attention against plain loops over rows, heads and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.attention.dense import attend

N, Q, T, H, K, D = 2, 5, 7, 4, 2, 8


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s).astype(dtype) for s in ((N, Q, H, D), (N, T, K, D), (N, T, K, D)))
    mask = rng.random((N, Q, T)) < 0.5
    mask[0, 1] = mask[1, 4] = False  # rows that see nothing
    mask[0, 2] = True
    return q, k, v, mask


def loops(q, k, v, mask):
    out = np.zeros((N, Q, H, D))
    for n, i, h in np.ndindex(N, Q, H):
        keys = [j for j in range(T) if mask[n, i, j]]
        if not keys:
            continue
        scores = np.array([q[n, i, h].astype(np.float64) @ k[n, j, h // (H // K)] / np.sqrt(D) for j in keys])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[n, i, h] = sum(w * v[n, j, h // (H // K)] for w, j in zip(weights, keys, strict=True))
    return out


def test_equals_loops():
    q, k, v, mask = inputs()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(attend(*map(jnp.asarray, (q, k, v, mask))), loops(q, k, v, mask), atol=2e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4])  # large scores: the softmax saturates
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_that_see_nothing(dtype, scale):
    q, k, v, mask = inputs()
    q, k, v = (scale * jnp.asarray(x, dtype) for x in (q, k, v))

    def total(q, k, v):
        out = attend(q, k, v, jnp.asarray(mask))
        # Linear too: a square alone would send nothing back into the rows that give 0.
        return jnp.sum(out.astype(jnp.float32) ** 2 + 10 * out), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert out.dtype == dtype
    blind = ~mask.any(-1)
    assert blind.sum() >= 2
    assert not np.asarray(out, np.float32)[blind].any()
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert not np.asarray(gradients[0], np.float32)[blind].any()


def test_gradients_equal_finite_differences():
    q, k, v, mask = (jnp.asarray(x) for x in inputs())
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(N, Q, H, D)), jnp.float32)
    directions = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (q, k, v))

    @jax.jit
    def total(step):
        moved = (x + step * d for x, d in zip((q, k, v), directions, strict=True))
        return jnp.sum(weights * attend(*moved, mask))

    with jax.default_matmul_precision("highest"):
        slope = jax.jit(jax.grad(total))(0.0)
        np.testing.assert_allclose(slope, (total(1e-2) - total(-1e-2)) / 2e-2, rtol=1e-2)


def test_bfloat16_is_close():
    q, k, v, mask = inputs()
    got = attend(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), jnp.asarray(mask))
    np.testing.assert_allclose(np.asarray(got, np.float32), loops(q, k, v, mask), atol=0.05)
