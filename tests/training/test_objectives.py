"""Both losses against published cases and against loops that know nothing of two streams."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.attention.masks import single_stream_rows
from marsjax.data.pipeline import needed_target_rows
from marsjax.training.attend import causal_attend
from marsjax.training.objectives import (
    Forward,
    Scored,
    check_aligned,
    mars,
    score_two_streams,
    sft,
)


@pytest.fixture(scope="module")
def causal_logits(tiny):
    """Logits [N, S, V] of plain causal sequences [N, S]: the reference has one stream, one document, no mask rule."""

    @jax.jit
    def run(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        model = tiny.build(tiny.params)
        rows = single_stream_rows(positions, jnp.ones_like(positions))
        hidden, _ = model(tokens, positions=positions, attend=causal_attend(rows))
        return model.unembed(hidden)

    return run


@pytest.fixture(scope="module")
def losses(tiny):
    @partial(jax.jit, static_argnames=("block_size", "noisy_length", "attention", "unroll"))
    def run(params, batch, *, block_size, noisy_length=None, attention="blocks", unroll=False):
        model = tiny.build(params, unroll=unroll)
        forward = Forward(attention=attention)
        return mars(model, batch, block_size=block_size, noisy_length=noisy_length, forward=forward)

    return run


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize("case", range(3))
def test_published_losses(make, tiny, losses, case, normalisation):
    case = json.loads((make.cases / "loss_cases.json").read_text())[case]
    rows = [
        [(t, next(i for i, x in enumerate(y) if x != -100))]
        for t, y in zip(case["tokens"], case["labels"], strict=True)
    ]
    batch = make.batch(rows, length=len(case["tokens"][0]), block_size=case["block_size"], normalisation=normalisation)
    sums = losses(tiny.params, batch, block_size=case["block_size"])
    np.testing.assert_allclose(sums.numerator / sums.denominator, case[f"loss_{normalisation}"], rtol=2e-6)
    if normalisation == "token":
        assert sums.denominator == case["supervised"]
        np.testing.assert_allclose(sums.terms["mask"], case["noisy_loss_sum"], rtol=2e-6)
        np.testing.assert_allclose(sums.terms["ar"], case["ar_loss_sum"], rtol=2e-6)
        plain = jax.jit(lambda b: sft(tiny.build(tiny.params), b))(batch)
        np.testing.assert_allclose(plain.numerator, case["ar_loss_sum"], rtol=2e-6)


def _two_stream_logits(tiny, batch, block_size, attention="blocks"):
    """Logits [N, L, V] of both streams: the head applied to what the objective gave the decoder."""
    seen = []
    model = tiny.build(tiny.params)

    class Spy:
        config, head_kernel, masks = model.config, model.head_kernel, model.masks

        def __call__(self, *args, **kwargs):
            hidden, states = model(*args, **kwargs)
            seen.append(model.unembed(hidden))
            return hidden, states

    scored = Scored(batch.weights != 0, batch.weights)
    forward = Forward(attention=attention)
    score_two_streams(Spy(), batch, block_size=block_size, clean=scored, noisy=scored, forward=forward)
    return jnp.split(seen[0], 2, axis=1)


def test_published_logits(make, tiny):
    for case in json.loads((make.cases / "loss_cases.json").read_text()):
        rows = [
            [(t, next(i for i, x in enumerate(y) if x != -100))]
            for t, y in zip(case["tokens"], case["labels"], strict=True)
        ]
        batch = make.batch(rows, length=len(case["tokens"][0]), block_size=case["block_size"])
        clean, noisy = jax.jit(lambda b, size=case["block_size"]: _two_stream_logits(tiny, b, size))(batch)
        # The published rows are shifted already: entry t is the distribution of token t. Entry 0 is forced to 0.
        for ours, theirs in ((clean, "clean_logits_row1_last"), (noisy, "noisy_logits_row1_last")):
            ours, theirs = np.asarray(ours[1, -2]), np.asarray(case[theirs])
            assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def brute_force(causal_logits, documents, block_size):
    """Per document the two sums of cross-entropy, each noisy row from a forward of its own."""
    inputs, wanted = [], []
    size = max(len(ids) for ids, _ in documents)
    for d, (ids, first) in enumerate(documents):
        for t in range(len(ids) - 1):
            if t + 1 < first:
                continue
            start = t // block_size * block_size
            masked = [MASK_ID if i >= first else ids[i] for i in range(start, t + 1)]
            for kind, sequence in (("ar", list(ids[: t + 1])), ("mask", [*ids[:start], *masked])):
                inputs.append(sequence + [0] * (size - len(sequence)))
                wanted.append((d, kind, t, int(ids[t + 1])))
    sums = {(d, kind): 0.0 for d in range(len(documents)) for kind in ("ar", "mask")}
    counts = [0] * len(documents)
    logits = np.asarray(causal_logits(np.array(inputs, np.int32)), np.float64)
    for row, (d, kind, t, target) in zip(logits[:, :, :], wanted, strict=True):
        line = row[t]
        sums[d, kind] += np.log(np.exp(line - line.max()).sum()) + line.max() - line[target]
        counts[d] += kind == "ar"
    return sums, counts


MASK_ID = 65


@pytest.mark.parametrize("attention", ["blocks", "dense"])
@pytest.mark.parametrize("packed", [False, True])
def test_brute_force_of_every_length(make, tiny, causal_logits, losses, attention, packed):
    documents = make.documents(0, range(1, 10))
    rows = [documents[i : i + 3] for i in range(0, 9, 3)] if packed else [[d] for d in documents]
    sums, counts = brute_force(causal_logits, documents, 4)
    batch = make.batch(rows, length=28 if packed else 9, block_size=4)
    for noisy_length in {None, needed_target_rows(batch, 4)} if attention == "blocks" else {None}:
        got = losses(tiny.params, batch, block_size=4, attention=attention, noisy_length=noisy_length)
        assert got.denominator == sum(counts)
        for kind in ("ar", "mask"):
            np.testing.assert_allclose(got.terms[kind], sum(sums[d, kind] for d in range(9)), rtol=1e-5)
    by_document = make.batch(rows, length=28 if packed else 9, block_size=4, normalisation="sequence")
    got = losses(tiny.params, by_document, block_size=4, attention=attention)
    assert got.denominator == 9  # a document of one token counts, though nothing in it is predicted
    for kind in ("ar", "mask"):
        expected = sum(sums[d, kind] / counts[d] for d in range(9) if counts[d])
        np.testing.assert_allclose(got.terms[kind], expected, rtol=1e-5)


@pytest.mark.parametrize("attention", ["blocks", "dense"])
def test_a_token_is_unseen_by_its_block_and_all_before(make, tiny, attention):
    [(ids, _)] = make.documents(1, [10])
    run = jax.jit(lambda b: _two_stream_logits(tiny, b, 4, attention)[1])
    base = np.asarray(run(make.batch([[(ids, 2)]], length=10, block_size=4)))
    for p in range(2, 10):
        changed = ids.copy()
        changed[p] = (changed[p] + 1) % 60
        noisy = np.asarray(run(make.batch([[(changed, 2)]], length=10, block_size=4)))
        end = (p // 4 + 1) * 4
        assert np.array_equal(noisy[0, :end], base[0, :end])
        if end < 10:
            assert not np.array_equal(noisy[0, end:], base[0, end:])


def test_nothing_crosses_documents(make, tiny):
    a, b, c = make.documents(2, [6, 7, 5])
    other = make.documents(3, [6, 5])
    run = jax.jit(lambda x: _two_stream_logits(tiny, x, 4))
    one = run(make.batch([[a, b, c]], length=24, block_size=4))
    two = run(make.batch([[other[0], b, other[1]]], length=24, block_size=4))
    for x, y in zip(one, two, strict=True):
        assert np.array_equal(x[0, 8:15], y[0, 8:15])
        assert not np.array_equal(x[0, :6], y[0, :6])


def test_gradients_of_the_paths_agree(make, tiny, losses):
    batch = make.batch([make.documents(4, [9, 6]), make.documents(5, [13])], length=24, block_size=4)

    @partial(jax.jit, static_argnames=("attention", "noisy_length", "unroll"))
    def gradient(params, **options):
        return jax.grad(lambda p: losses(p, batch, block_size=4, **options).numerator)(params)

    reference = gradient(tiny.params, attention="dense")
    for options in ({}, {"noisy_length": needed_target_rows(batch, 4), "unroll": True}):
        for want, got in zip(
            jax.tree.leaves(reference), jax.tree.leaves(gradient(tiny.params, **options)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_ar_weight(make, tiny, losses):
    batch = make.batch([make.documents(6, [9])], length=12, block_size=4)

    def weighted(weight):
        return mars(tiny.build(tiny.params), batch, block_size=4, ar_weight=weight)

    full = losses(tiny.params, batch, block_size=4)
    traced = jax.jit(lambda weight: weighted(weight).numerator)
    for weight in (0.0, 0.25, 2.0):
        expected = full.terms["mask"] + weight * full.terms["ar"]
        np.testing.assert_allclose(traced(weight), expected, rtol=1e-5)
    without = jax.jit(lambda: weighted(0))()
    assert "ar" not in without.terms
    np.testing.assert_allclose(without.numerator, full.terms["mask"], rtol=1e-5)


@pytest.mark.parametrize(("objective", "dtype"), [("sft", jnp.float32), ("mars", jnp.float32), ("mars", jnp.bfloat16)])
def test_nothing_supervised_is_exactly_zero(make, tiny, objective, dtype):
    batch = make.batch([[], [(np.arange(2, 9), 7)]], length=8, block_size=4)  # padding only; prompt only
    assert not batch.weights.any()
    forward = Forward(dtype=dtype)

    def loss(params):
        model = tiny.build(params)
        sums = (
            mars(model, batch, block_size=4, forward=forward)
            if objective == "mars"
            else sft(model, batch, forward=forward)
        )
        return sums.numerator

    value, gradients = jax.jit(jax.value_and_grad(loss))(tiny.params)
    assert value == 0
    assert all(np.array_equal(g, np.zeros_like(g)) for g in jax.tree.leaves(gradients))


def test_bfloat16_is_near_float32(make, tiny, losses):
    batch = make.batch([make.documents(7, [11])], length=12, block_size=4)
    exact = losses(tiny.params, batch, block_size=4)
    rough = jax.jit(lambda p: mars(tiny.build(p), batch, block_size=4, forward=Forward(dtype=jnp.bfloat16)))(
        tiny.params
    )
    assert rough.numerator.dtype == jnp.float32
    np.testing.assert_allclose(rough.numerator, exact.numerator, rtol=0.02)
    assert rough.numerator != exact.numerator


def test_unaligned_documents_are_refused(make):
    batch = make.batch([make.documents(8, [5, 5])], length=16, block_size=4)
    check_aligned(batch, 4)
    with pytest.raises(ValueError, match="block_size=16"):
        check_aligned(batch, 16)
