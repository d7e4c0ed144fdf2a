"""Block diffusion's loss against a loop that has one stream, one document and one block at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.attention import dense
from marsjax.data.pipeline import needed_target_rows
from marsjax.training.block_diffusion import LEAST_RATE, block_diffusion, draw_masks, loss_of_masks
from marsjax.training.objectives import Forward, sft

MASK = 65
SIZE = 9  # of the longest document


@pytest.fixture(scope="module")
def logits_of(tiny):
    """Logits [N, S, V] of sequences [N, S] in which every block sees itself and the blocks before it."""

    @partial(jax.jit, static_argnames="block_size")
    def run(tokens, block_size):
        mask = np.array([[[j // block_size <= i // block_size for j in range(SIZE)] for i in range(SIZE)]])
        # What fills a sequence up must not be seen: id -1 marks it.
        mask = mask & (tokens >= 0)[:, None, :]
        model = tiny.build(tiny.params)
        positions = jnp.broadcast_to(jnp.arange(SIZE), tokens.shape)
        hidden, _ = model(
            jnp.maximum(tokens, 0), positions=positions, attend=lambda q, k, v, s: (dense.attend(q, k, v, mask), s)
        )
        return model.unembed(hidden)

    return lambda rows, block_size: np.asarray(run(np.array(rows, np.int32), block_size), np.float64)


@pytest.fixture(scope="module")
def losses(tiny):
    @partial(jax.jit, static_argnames=("block_size", "noisy_length", "attention", "unroll"))
    def run(params, batch, masked, rate, *, block_size, noisy_length=None, attention="blocks", unroll=False):
        model, forward = tiny.build(params, unroll=unroll), Forward(attention=attention)
        return loss_of_masks(
            model, batch, masked, rate, block_size=block_size, noisy_length=noisy_length, forward=forward
        )

    return run


def brute_force(logits_of, ids, masked, rate, block_size):
    """Σ cross-entropy / rate over the masked tokens of one document."""
    inputs, wanted = [], []
    for token in np.flatnonzero(masked):
        start = token // block_size * block_size
        if token == start:
            sequence = list(ids[:start])
        else:
            noised = [MASK if masked[i] else ids[i] for i in range(start, min(start + block_size, len(ids)))]
            sequence = [*ids[:start], *noised]
        inputs.append([*sequence, *[-1] * (SIZE - len(sequence))])
        wanted.append(token)
    total = 0.0
    for row, token in zip(logits_of(inputs, block_size) if inputs else (), wanted, strict=True):
        line = row[token - 1]
        entropy = np.log(np.exp(line - line.max()).sum()) + line.max() - line[ids[token]]
        total += entropy / rate[token]
    return total


def in_rows(values, rows, like, block_size):
    """Per-document arrays laid out as `make.batch` lays the documents out."""
    out = np.zeros(like.shape, values[0].dtype)
    values = iter(values)
    for r, documents in enumerate(rows):
        start = 0
        for ids, _ in documents:
            out[r, start : start + len(ids)] = next(values)
            start = -(-(start + len(ids)) // block_size) * block_size
    return out


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("attention", ["blocks", "dense"])
@pytest.mark.parametrize("packed", [False, True])
def test_brute_force_of_every_length(make, tiny, logits_of, losses, attention, packed, block_size):
    rng, documents = np.random.default_rng(block_size), make.documents(0, range(1, SIZE + 1))
    masked = [(rng.random(len(ids)) < 0.7) & (np.arange(len(ids)) >= max(first, 1)) for ids, first in documents]
    rate = [np.repeat(rng.uniform(0.1, 1, SIZE), block_size)[: len(ids)].astype(np.float32) for ids, _ in documents]
    expected = sum(
        brute_force(logits_of, ids, m, r, block_size) for (ids, _), m, r in zip(documents, masked, rate, strict=True)
    )
    rows = [documents[i : i + 3] for i in range(0, 9, 3)] if packed else [[d] for d in documents]
    length = 3 * -(-SIZE // block_size) * block_size if packed else SIZE
    batch = make.batch(rows, length=length, block_size=block_size)
    masked, rate = (in_rows(x, rows, batch.tokens, block_size) for x in (masked, rate))
    assert masked.sum() > 10
    for noisy_length in {None, needed_target_rows(batch, block_size)}:
        got = losses(
            tiny.params, batch, masked, rate, block_size=block_size, attention=attention, noisy_length=noisy_length
        )
        np.testing.assert_allclose(got.numerator, expected, rtol=1e-5)
        assert got.denominator == (batch.weights != 0).sum()


def test_blocks_that_reach_past_the_row(make, tiny, losses):
    """L is no multiple of B and the compact rows hold the last block: what fills it up is seen by nobody."""
    ids = np.arange(2, 15)
    batch = make.batch([[(ids, 9)]], length=13, block_size=8)
    masked, rate = (batch.noisy == MASK) & (np.arange(13) % 2 == 0), np.full((1, 13), 0.5, np.float32)
    assert needed_target_rows(batch, 8) == 8
    compact, whole = (losses(tiny.params, batch, masked, rate, block_size=8, noisy_length=n) for n in (8, None))
    np.testing.assert_allclose(compact.numerator, whole.numerator, rtol=1e-6)


def test_gradients_of_the_paths_agree(make, tiny, losses):
    batch = make.batch([make.documents(4, [9, 6]), make.documents(5, [13])], length=24, block_size=4)
    masked, rate = draw_masks(jax.random.key(0), batch, 4)

    @partial(jax.jit, static_argnames=("attention", "noisy_length", "unroll"))
    def gradient(params, **options):
        return jax.grad(lambda p: losses(p, batch, masked, rate, block_size=4, **options).numerator)(params)

    reference = gradient(tiny.params, attention="dense")
    for options in ({}, {"noisy_length": needed_target_rows(batch, 4), "unroll": True}):
        for want, got in zip(
            jax.tree.leaves(reference), jax.tree.leaves(gradient(tiny.params, **options)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_draws(make):
    """Of predicted tokens only, one rate a block of a document, and each token counts once in the mean."""
    documents = [[(np.arange(2, 17), 0), (np.arange(20, 30), 6)], [(np.arange(2, 40), 3)]]
    batch = make.batch(documents, length=40, block_size=4)
    draw = jax.jit(jax.vmap(lambda key: draw_masks(key, batch, 4)))
    masked, rate = map(np.asarray, draw(jax.random.split(jax.random.key(1), 20_000)))
    assert ((rate >= LEAST_RATE) & (rate < 1)).all()
    for r, c in np.argwhere(batch.segments != 0):
        assert np.array_equal(rate[:, r, c], rate[:, r, c - batch.positions[r, c] % 4])
    other = (batch.segments != 0) & (batch.positions % 4 == 0)
    assert len(np.unique(rate[0][other])) == other.sum()
    predicted = np.pad(batch.weights[:, :-1] != 0, ((0, 0), (1, 0)))
    assert np.array_equal(masked.any(0), predicted)
    assert not predicted[:, 0].any()
    np.testing.assert_allclose(masked.mean(0)[predicted], 0.5, atol=0.02)
    # E[1 / t] over masked tokens is 1, its variance ln(1/ε) - 1.
    np.testing.assert_allclose(np.where(masked, 1 / rate, 0).mean(0)[predicted], 1, atol=0.1)
    # Given t, tokens are independent: within a block they agree as often as E[t²] + E[(1-t)²] says.
    np.testing.assert_allclose((masked[:, 1, 8] == masked[:, 1, 9]).mean(), 2 / 3, atol=0.02)
    np.testing.assert_allclose((masked[:, 1, 8] == masked[:, 1, 12]).mean(), 1 / 2, atol=0.02)


def test_blocks_of_one_are_ar(make, tiny, losses):
    """Whatever is masked; so in the mean over masks too."""
    batch = make.batch([make.documents(6, [9]), make.documents(7, [5])], length=12, block_size=1)
    everything = np.pad(batch.weights[:, :-1] != 0, ((0, 0), (1, 0)))
    got = losses(tiny.params, batch, everything, np.ones(everything.shape, np.float32), block_size=1)
    np.testing.assert_allclose(got.numerator, sft(tiny.build(tiny.params), batch).numerator, rtol=1e-5)


def test_the_loss_is_a_function_of_the_key(make, tiny):
    batch = make.batch([make.documents(7, [9, 6])], length=20, block_size=4)

    @jax.jit
    def run(key):
        return block_diffusion(tiny.build(tiny.params), batch, key, block_size=4, forward=Forward()).numerator

    assert run(jax.random.key(3)) == run(jax.random.key(3))
    assert run(jax.random.key(3)) != run(jax.random.key(4))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nothing_masked_is_exactly_zero(make, tiny, dtype):
    """Nothing supervised; and supervised, but nothing of it drawn."""
    forward = Forward(dtype=dtype)
    for documents, length in ([[], [(np.arange(2, 9), 7)]], 8), ([make.documents(8, [8])], 8):
        batch = make.batch(documents, length=length, block_size=4)
        nothing = np.zeros(batch.tokens.shape, bool)

        def loss(params, batch=batch, nothing=nothing):
            model, rate = tiny.build(params), jnp.zeros(nothing.shape)
            return loss_of_masks(model, batch, nothing, rate, block_size=4, forward=forward).numerator

        value, gradients = jax.jit(jax.value_and_grad(loss))(tiny.params)
        assert value == 0
        assert all(np.array_equal(g, np.zeros_like(g)) for g in jax.tree.leaves(gradients))


def test_a_block_sees_its_answer_both_ways_and_later_blocks_not_at_all(make, tiny, losses):
    [(ids, _)] = make.documents(9, [12])
    base = make.batch([[(ids, 1)]], length=12, block_size=4)
    masked, rate = np.arange(12)[None] == 5, np.ones((1, 12), np.float32)
    loss = losses(tiny.params, base, masked, rate, block_size=4).numerator
    for position in range(12):
        changed = ids.copy()
        changed[position] = (ids[position] + 1) % 60
        batch = make.batch([[(changed, 1)]], length=12, block_size=4)
        same = losses(tiny.params, batch, masked, rate, block_size=4).numerator == loss
        assert same == (position >= 8), position
