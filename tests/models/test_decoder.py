import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.attention.dense import attend
from marsjax.models import Decoder, Llama3Scaling, ModelConfig, abstract, to_list, to_stacked
from marsjax.models.decoder import rope_frequencies

TOKENS = jnp.array(np.random.default_rng(0).integers(0, 50, (2, 11)), jnp.int32)


@functools.cache
def make(family="qwen2", layout="stacked", tied=False):
    config = ModelConfig(family, 50, 32, 48, 3, 4, 2, 8, rope_theta=1e4, tie_embeddings=tied)
    graphdef, params = abstract(config, layout)
    rng = np.random.default_rng(1)
    noise = lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(noise, params))


def run(model, tokens=TOKENS, shift=0, **options):
    graphdef, params = nnx.split(model)
    return jax.jit(forward, static_argnums=0, static_argnames=("dtype", "remat"))(
        graphdef, params, tokens, shift, **options
    )


def forward(graphdef, params, tokens, shift, **options):
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = positions[:, :, None] >= positions[:, None, :]
    see = lambda q, k, v, state: (attend(q, k, v, mask), state)  # noqa: E731
    hidden, _ = model(tokens, positions=positions + shift, attend=see, **options)
    return model.unembed(hidden)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_both_layouts_agree(family):
    stacked = make(family)
    listed = to_list(stacked)
    np.testing.assert_allclose(run(stacked), run(listed), rtol=1e-5, atol=1e-5)
    back = to_stacked(listed)
    for path, variable in nnx.state(stacked).flat_state():
        np.testing.assert_array_equal(dict(nnx.state(back).flat_state())[path][...], variable[...])


@pytest.mark.parametrize(
    ("family", "layout", "tied"), [("qwen2", "stacked", True), ("qwen3", "list", False), ("llama", "stacked", False)]
)
def test_abstract_is_the_model_without_arrays(family, layout, tied):
    config = ModelConfig(family, 50, 32, 48, 3, 4, 2, 8, tie_embeddings=tied)
    model = Decoder(config, rngs=nnx.Rngs(0), layout=layout)
    _, params = abstract(model.config, layout)
    shapes = {path: variable.get_raw_value().shape for path, variable in params.flat_state()}
    assert shapes == {path: variable[...].shape for path, variable in nnx.state(model).flat_state()}
    assert (("head", "kernel") in shapes) == (not tied)
    assert any("bias" in path for path in shapes) == (family == "qwen2")
    assert any("q_norm" in path for path in shapes) == (family == "qwen3")


def test_remat_changes_neither_values_nor_gradients():
    graphdef, params = nnx.split(make())

    def loss(params, remat):
        return jnp.mean(jnp.square(forward(graphdef, params, TOKENS, 0, remat=remat)))

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    plain, remat = step(params, None), step(params, "nothing_saveable")
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_bfloat16_stays_close_and_logits_are_float32():
    model = make()
    exact, rough = run(model), run(model, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    assert 1e-5 < float(jnp.linalg.norm(exact - rough) / jnp.linalg.norm(exact)) < 0.05


def test_layer_states_travel_with_their_layer():
    for layout in ("stacked", "list"):
        model = make(layout=layout)
        states = jnp.arange(3.0) if layout == "stacked" else [jnp.float32(i) for i in range(3)]
        positions = jnp.zeros((1, 1), jnp.int32)
        see = lambda q, k, v, state: (q * 0, state + 10 + jnp.sum(k) * 0)  # noqa: E731
        _, new = model(TOKENS[:1, :1], positions=positions, attend=see, layer_states=states)
        np.testing.assert_array_equal(np.asarray(new), [10, 11, 12])


def test_only_relative_positions_matter():
    model = make()
    here, there = run(model), run(model, shift=57)
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-3)


def test_embeddings_instead_of_tokens():
    model = make()
    positions = jnp.zeros((2, 11), jnp.int32)
    see = lambda q, k, v, state: (v.repeat(2, axis=2), state)  # noqa: E731
    by_token = model(TOKENS, positions=positions, attend=see)[0]
    np.testing.assert_array_equal(by_token, model(embeddings=model.embed(TOKENS), positions=positions, attend=see)[0])
    for wrong in ({}, {"tokens": TOKENS, "embeddings": model.embed(TOKENS)}):
        with pytest.raises(ValueError, match="either tokens or embeddings"):
            model(**wrong, positions=positions, attend=see)


def test_llama3_frequencies_pair_by_pair():
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    plain, scaled = (np.asarray(rope_frequencies(16, 1e4, s)) for s in (None, scaling))
    kinds = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * np.pi / before
        if wavelength < 64 / 4:
            expected, kind = before, "kept"
        elif wavelength > 64 / 1:
            expected, kind = before / 8, "stretched"
        else:
            part = (64 / wavelength - 1) / 3
            expected, kind = (1 - part) * before / 8 + part * before, "between"
        kinds.add(kind)
        np.testing.assert_allclose(after, expected, rtol=1e-5)
    assert kinds == {"kept", "stretched", "between"}
