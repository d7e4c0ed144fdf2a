"""The attentions of training against each other: all rows at once, some at a time, and the kernel's path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.attention import dense
from marsjax.attention.masks import (
    CLEAN,
    NOISY,
    Rows,
    block_diffusion,
    dense_mask,
    joined,
    masks_behind_rows,
    multi_token,
    single_stream_rows,
    stream_rows,
    two_stream,
)
from marsjax.data.pipeline import needed_target_rows
from marsjax.training import attend as module
from marsjax.training.attend import behind_attend, causal_attend, two_stream_attend
from marsjax.training.objectives import Forward, mars, sft

LENGTH = 96


def documents(block_size):
    positions, segments = np.zeros((2, LENGTH), np.int32), np.zeros((2, LENGTH), np.int32)
    for row, sizes in enumerate(((37, 20), (90,))):
        start = 0
        for number, size in enumerate(sizes, 1):
            positions[row, start : start + size] = np.arange(size)
            segments[row, start : start + size] = number
            start += -(-size // block_size) * block_size
    return positions, segments


def streams(block_size, noisy):
    positions, segments = documents(block_size)
    rng = np.random.default_rng(0)
    blocks = [np.sort(rng.permutation(LENGTH // block_size)[: noisy // block_size]) for _ in positions]
    columns = np.stack([(b[:, None] * block_size + np.arange(block_size)).reshape(-1) for b in blocks])
    taken = (np.take_along_axis(x, columns, 1) for x in (positions, segments))
    clean = stream_rows(CLEAN, positions, segments, block_size)
    rows = (Rows(*map(jnp.asarray, r)) for r in (clean, stream_rows(NOISY, *taken, block_size)))
    return *rows, jnp.asarray(columns, jnp.int32)


def masks(k, anchors):
    """(clean rows, rows of k masks behind each anchor, columns of the anchors [2, anchors k]); two are unused."""
    positions, segments = documents(1)
    rng = np.random.default_rng(0)
    columns = np.stack([np.sort(rng.permutation(LENGTH)[:anchors]) for _ in positions])
    position, segment = (np.take_along_axis(x, columns, 1) for x in (positions, segments))
    segment[0, 3] = segment[1, 5] = 0
    rows = stream_rows(CLEAN, positions, segments, 1), masks_behind_rows(position, segment, k)
    return *(Rows(*map(jnp.asarray, r)) for r in rows), jnp.asarray(np.repeat(columns, k, axis=1), jnp.int32)


def values_and_gradients(attend, rows):
    shapes = ((2, rows, h, 16) for h in (4, 2, 2))
    inputs = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]

    def total(q, k, v):
        out, state = attend(q, k, v, "state")
        assert state == "state"
        return (out**2).sum() + 3 * out.sum(), out

    with jax.default_matmul_precision("highest"):
        (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return out, *gradients


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.fixture
def some_rows_at_a_time(monkeypatch):
    """A third of 96 rows at a time, in whole blocks and threes: the last ones are padded."""
    monkeypatch.setattr(module, "SCORE_BYTES", 2 * 4 * LENGTH * 4 * 40)
    monkeypatch.setattr(module, "LEAST_ROWS", 3)
    seen = []
    by_rows = module._by_rows
    monkeypatch.setattr(module, "_by_rows", lambda *x: seen.append(x[1]) or by_rows(*x))
    return seen


@pytest.mark.parametrize("rule", [two_stream, block_diffusion])
@pytest.mark.parametrize(("block_size", "noisy"), [(4, LENGTH), (4, 48), (3, 60)])
def test_some_rows_at_a_time(some_rows_at_a_time, block_size, noisy, rule):
    clean, noisy_rows, _ = streams(block_size, noisy)
    blocks, dense = (two_stream_attend(clean, noisy_rows, block_size, name, rule) for name in ("blocks", "dense"))
    assert_close(*(values_and_gradients(attend, LENGTH + noisy) for attend in (blocks, dense)))
    assert some_rows_at_a_time[0] == 33  # of the clean stream
    assert some_rows_at_a_time[1] == {(4, LENGTH): 36, (4, 48): 24, (3, 60): 30}[block_size, noisy]


@pytest.mark.parametrize(("k", "anchors"), [(1, 90), (2, 60), (4, 30), (8, 20)])
def test_masks_some_rows_at_a_time(some_rows_at_a_time, k, anchors):
    clean, rows, _ = masks(k, anchors)
    blocks, dense = (two_stream_attend(clean, rows, k, name, multi_token) for name in ("blocks", "dense"))
    assert_close(*(values_and_gradients(attend, LENGTH + anchors * k) for attend in (blocks, dense)))
    assert some_rows_at_a_time[1] < anchors * k


def test_masks_equal_their_document_alone():
    """A row's result is that of one pass over its document up to the anchor and the anchor's masks up to itself."""
    k = 4
    clean, rows, columns = masks(k, 30)
    q, keys, values = (np.asarray(jax.random.normal(jax.random.key(i), (2, LENGTH + 120, 1, 16))) for i in range(3))
    got = two_stream_attend(clean, rows, k, "dense", multi_token)(q, keys, values, None)[0]
    for n, row in np.ndindex(rows.segment.shape):
        if rows.segment[n, row] == 0:
            assert not np.asarray(got[n, LENGTH + row]).any()
            continue
        at = int(columns[n, row])
        begin = at - int(clean.position[n, at])
        seen = np.r_[begin : at + 1, LENGTH + row - row % k : LENGTH + row + 1]
        scores = keys[n, seen, 0] @ q[n, LENGTH + row, 0] / 4
        weights = np.exp(scores - scores.max())
        want = weights @ values[n, seen, 0] / weights.sum()
        np.testing.assert_allclose(got[n, LENGTH + row, 0], want, rtol=1e-4, atol=1e-5)


def test_some_causal_rows_at_a_time(some_rows_at_a_time):
    rows = Rows(*map(jnp.asarray, single_stream_rows(*documents(1))))
    assert_close(*(values_and_gradients(causal_attend(rows, name), LENGTH) for name in ("blocks", "dense")))
    assert some_rows_at_a_time == [33]


def test_memory_is_bounded():
    """Of 4,096 rows: the clean scores of all would be 512 MiB, as would the noisy ones, forward alone."""
    length = 4096
    segments = jnp.ones((1, length), jnp.int32)
    rows = [stream_rows(s, jnp.arange(length, dtype=jnp.int32)[None], segments, 4) for s in (CLEAN, NOISY)]
    q = jax.ShapeDtypeStruct((1, 2 * length, 8, 16), jnp.float32)

    def total(attention):
        return lambda q, k, v: two_stream_attend(*rows, 4, attention)(q, k, v, None)[0].sum()

    compiled = jax.jit(jax.grad(total("blocks"), argnums=(0, 1, 2))).lower(q, q, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * module.SCORE_BYTES


@pytest.mark.parametrize("noisy", [LENGTH, 48])
def test_splash_is_the_same_attention(noisy):
    clean, noisy_rows, columns = streams(4, noisy)
    blocks = two_stream_attend(clean, noisy_rows, 4)
    kernel = two_stream_attend(clean, noisy_rows, 4, "splash", columns=columns)
    assert_close(*(values_and_gradients(attend, LENGTH + noisy) for attend in (kernel, blocks)))


def test_splash_is_the_same_attention_of_masks():
    clean, rows, columns = masks(8, 20)
    blocks = two_stream_attend(clean, rows, 8, rule=multi_token)
    kernel = two_stream_attend(clean, rows, 8, "splash", multi_token, columns=columns)
    assert_close(*(values_and_gradients(attend, LENGTH + 160) for attend in (kernel, blocks)))


@pytest.mark.parametrize("constant", [False, True])
def test_behind_is_the_same_attention(constant):
    """Clean rows first, then the masks, to the keys that those left; if constant, only clean rows move these."""
    clean, rows, columns = masks(8, 20)

    def in_two(name):
        first = causal_attend(clean, name)
        behind = behind_attend(clean, rows, 8, name, multi_token, constant=constant, columns=columns)

        def attend(q, k, v, state):
            kept = k[:, :LENGTH], v[:, :LENGTH]
            mixed = first(q[:, :LENGTH], *kept, None)[0], behind(q[:, LENGTH:], k[:, LENGTH:], v[:, LENGTH:], kept)[0]
            return jnp.concatenate(mixed, axis=1), state

        return values_and_gradients(attend, LENGTH + 160)

    mask = dense_mask(multi_token, joined(clean, rows, jnp))

    def reference(q, k, v, state):
        kept = jax.lax.stop_gradient((k[:, :LENGTH], v[:, :LENGTH]))
        of_masks = (jnp.concatenate([a, x[:, LENGTH:]], axis=1) for a, x in zip(kept, (k, v), strict=True))
        first = dense.attend(q, k, v, mask)
        mixed = dense.attend(q[:, LENGTH:], *of_masks, mask[:, LENGTH:]) if constant else first[:, LENGTH:]
        return jnp.concatenate([first[:, :LENGTH], mixed], axis=1), state

    want = values_and_gradients(reference, LENGTH + 160)
    for name in ("dense", "blocks", "splash"):
        assert_close(in_two(name), want)


def test_splash_is_the_same_causal_attention():
    rows = Rows(*map(jnp.asarray, single_stream_rows(*documents(1))))
    assert_close(*(values_and_gradients(causal_attend(rows, name), LENGTH) for name in ("splash", "dense")))


@pytest.mark.parametrize("name", ["mars", "compact mars", "sft"])
def test_splash_in_the_objectives(make, tiny, name):
    """Through the scanned layers, with remat, and with a length that is no multiple of the block size."""
    batch = make.batch([make.documents(4, [9, 7]), make.documents(5, [13])], length=26, block_size=4)
    noisy_length = needed_target_rows(batch, 4) if name == "compact mars" else None
    assert noisy_length is None or noisy_length < 26

    def loss(params, forward):
        model = tiny.build(params)
        if name == "sft":
            return sft(model, batch, forward=forward).numerator
        return mars(model, batch, block_size=4, noisy_length=noisy_length, forward=forward).numerator

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    kernel = run(tiny.params, Forward(attention="splash", remat="nothing_saveable"))
    for got, want in zip(*(jax.tree.leaves(x) for x in (kernel, run(tiny.params, Forward()))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("block_size", "noisy", "head_dim"), [(4, LENGTH, 64), (4, 48, 128), (3, 60, 64)])
def test_lowering_for_a_tpu_that_is_not_here(block_size, noisy, head_dim):
    assert_lowers(streams(block_size, noisy), block_size, two_stream, head_dim)


@pytest.mark.parametrize("k", [3, 8])
def test_masks_lower_for_a_tpu_that_is_not_here(k):
    assert_lowers(masks(k, 40), k, multi_token, 128)


def assert_lowers(streams, block_size, rule, head_dim):
    clean, noisy_rows, columns = streams
    noisy = columns.shape[1]
    shapes = (jax.ShapeDtypeStruct((2, LENGTH + noisy, h, head_dim), jnp.bfloat16) for h in (14, 2, 2))
    q, k, v = shapes
    for interpret, kernels in ((False, 3), (True, 0)):  # forward, and backward to q and to k and v
        attend = two_stream_attend(clean, noisy_rows, block_size, "splash", rule, columns=columns, interpret=interpret)
        gradient = jax.grad(lambda q, k, v, attend=attend: attend(q, k, v, None)[0].sum(), argnums=(0, 1, 2))
        text = jax.jit(gradient).trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == kernels


def test_refusals():
    clean, noisy_rows, _ = streams(4, 48)
    with pytest.raises(ValueError, match="'flash' is not one of blocks, dense, splash"):
        two_stream_attend(clean, noisy_rows, 4, "flash")
    with pytest.raises(ValueError, match="48 noisy rows to 96 needs their columns"):
        two_stream_attend(clean, noisy_rows, 4, "splash")
    clean, rows, _ = masks(4, 24)  # as many masks as columns
    with pytest.raises(ValueError, match="96 noisy rows to 96 needs their columns"):
        two_stream_attend(clean, rows, 4, "splash", multi_token)
