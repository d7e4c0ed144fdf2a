"""New adapters: they change nothing yet, and their masks look like tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.attention import dense
from marsjax.models import Decoder, ModelConfig
from marsjax.models.adapters import attach, split
from marsjax.models.config import AdapterConfig
from marsjax.models.layers import Gate

CONFIG = ModelConfig("qwen2", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=8)  # fmt: skip
ADAPTER = AdapterConfig(rank=3, alpha=6.0, masks=64)


@pytest.mark.parametrize("gated", [False, True])
def test_a_new_adapter_changes_nothing(gated):
    base = Decoder(CONFIG, rngs=nnx.Rngs(0))
    positions, mask = jnp.arange(6)[None], jnp.tri(6, dtype=bool)[None]
    one, other = (
        model(
            positions + 3,
            positions=positions,
            attend=lambda q, k, v, state: (dense.attend(q, k, v, mask), state),
            gate=Gate(6, 4),
        )[0]
        for model in (base, attach(base, dataclasses.replace(ADAPTER, gated=gated)))
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("initializer_range", [0.02, 0.0])
def test_masks_are_scattered_as_tokens_are(initializer_range):
    """Whatever the model's own first weights were drawn with."""
    base = Decoder(dataclasses.replace(CONFIG, initializer_range=initializer_range), rngs=nnx.Rngs(0))
    table = np.random.default_rng(0).normal(0.7, 0.3, (64, 32)).astype(np.float32)
    base.embed_table.embedding[...] = jnp.asarray(table)
    own, added = split(nnx.to_pure_dict(nnx.state(attach(base, ADAPTER))))
    masks = np.asarray(added["masks"]["embedding"])
    assert abs(masks.mean() - 0.7) < 0.05
    assert abs(masks.std() - 0.3) < 0.05
    np.testing.assert_array_equal(own["embed_table"]["embedding"], table)
