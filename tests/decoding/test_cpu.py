"""The layout for CPUs computes what the decoder computes, for every number of rows and threads."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.decoding import cpu
from marsjax.models.decoder import Linear


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 40])
def test_joint_linear(rows, threads, monkeypatch):
    monkeypatch.setattr(cpu, "threads", lambda: threads)
    rngs = nnx.Rngs(0)
    make = functools.partial(Linear, 24, axes=("embed", "heads"), bias=True, rngs=rngs, scale=0.3, dtype=jnp.float32)
    linears = [make(out) for out in (30, 6, 12)]
    for i, linear in enumerate(linears):
        linear.bias[...] = jnp.arange(linear.bias.shape[0], dtype=jnp.float32) + i
    joint = cpu.JointLinear(linears, consume=False)
    assert len(joint.parts) == max(n for n in range(1, threads + 1) if 48 % n == 0)
    x = np.random.default_rng(rows).standard_normal((rows, 24), dtype=np.float32)
    for y, linear in zip(joint(jnp.asarray(x)), linears, strict=True):
        wanted = x.astype(np.float64) @ np.asarray(linear.kernel[...], np.float64) + np.asarray(linear.bias[...])
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def test_rows_may_have_any_shape():
    linear = Linear(8, 6, ("embed", "heads"), rngs=nnx.Rngs(1), scale=0.3, dtype=jnp.float32)
    joint = cpu.JointLinear([linear], consume=False)
    x = jnp.ones((2, 3, 8))
    np.testing.assert_allclose(joint(x)[0], linear(x), rtol=1e-6)
    assert joint(x[:1, :1])[0].shape == (1, 1, 6)
