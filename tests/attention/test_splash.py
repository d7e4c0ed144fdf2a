"""The splash kernel's path, run step by step (interpret mode), against the dense one; its tiles against the mask."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.attention import dense, splash
from marsjax.attention.masks import (
    CLEAN,
    NOISY,
    block_diffusion,
    causal,
    dense_mask,
    joined,
    masks_behind_rows,
    multi_token,
    single_stream_rows,
    stream_rows,
    two_stream,
    two_stream_rows,
)
from marsjax.attention.splash import CausalMask, Layout, Tiles, TwoStreamMask, row_ids, visits


def packed(length, block_size, *rows):
    """(positions, segments) [N, length]: documents of these lengths in each row, each at a multiple of block_size."""
    positions, segments = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    for row, documents in enumerate(rows):
        start = 0
        for number, size in enumerate(documents, 1):
            assert start + size <= length
            positions[row, start : start + size] = np.arange(size)
            segments[row, start : start + size] = number
            start += -(-size // block_size) * block_size
    return positions, segments


def compaction(length, noisy, block_size, rng):
    """Columns [noisy] of random whole blocks, ascending."""
    if noisy == length:
        return np.arange(length, dtype=np.int32)
    blocks = np.sort(rng.permutation(length // block_size)[: noisy // block_size])
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1).astype(np.int32)


def columns_of_clean(length, noisy, block_size):
    """(clean rows, noisy rows, their columns) of a compact stream."""
    positions, segments = packed(length, block_size, (37, 1, 50, 9), (101,))
    rng = np.random.default_rng(1)
    columns = np.stack([compaction(length, noisy, block_size, rng) for _ in segments])
    of_noisy = (np.take_along_axis(x, columns, 1) for x in (positions, segments))
    clean = stream_rows(CLEAN, positions, segments, block_size)
    return clean, stream_rows(NOISY, *of_noisy, block_size), columns


def values_and_gradients(attend, inputs, weights):
    def total(q, k, v):
        out = attend(q, k, v)
        return (weights * out).sum() + 3 * out.sum(), out

    with jax.default_matmul_precision("highest"):
        (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return out, *gradients


def assert_equal(kernel_attend, mask, rows, heads, kv_heads, head_dim):
    """Out and gradients with random inputs [N, rows, ...]; padding too: it is 0 on both paths."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(len(mask), rows, h, head_dim)).astype(np.float32) for h in (heads, kv_heads, kv_heads)]
    weights = rng.normal(size=inputs[0].shape).astype(np.float32)
    want = values_and_gradients(lambda q, k, v: dense.attend(q, k, v, mask), inputs, weights)
    got = values_and_gradients(lambda q, k, v: kernel_attend(q, k, v, None)[0], inputs, weights)
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5, err_msg=name)
    assert np.abs(want[0]).max() > 1
    blind = ~mask.any(-1)
    assert blind.any()
    assert not np.asarray(got[0])[blind].any()


CASES = {
    "all columns, B = 4": (128, 128, 4, (2, 2, 64), None),
    "compact, B = 4, 7 heads a key head": (256, 128, 4, (7, 1, 64), None),
    "compact, B = 8, two groups": (256, 64, 8, (4, 2, 128), Tiles(128, 128)),
    "compact, B = 16, tiles that differ": (256, 96, 16, (2, 1, 64), Tiles(128, 256, 256, 128)),
    "one backward kernel": (256, 128, 8, (2, 1, 64), Tiles(128, 128, fused=True)),
    "lengths no multiple of the tile": (204, 204, 4, (2, 1, 64), Tiles(128, 128)),
    "B no power of two": (132, 66, 3, (2, 1, 64), Tiles(128, 128)),
}


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        *((case, two_stream) for case in CASES),
        *((case, block_diffusion) for case in ("compact, B = 8, two groups", "B no power of two")),
    ],
)
def test_two_stream_equals_dense(case, rule):
    length, noisy, block_size, heads, tiles = CASES[case]
    clean, of_noisy, columns = columns_of_clean(length, noisy, block_size)
    rows = joined(clean, of_noisy)
    attend = splash.two_stream_attend(
        *(jnp.asarray(x) for x in (clean.segment, of_noisy.segment, columns)),
        block_size, rule=rule, tiles=tiles, interpret=True,
    )  # fmt: skip
    assert_equal(attend, dense_mask(rule, rows), length + noisy, *heads)


def choose_anchors(length, count, rng, first=0):
    """Distinct ascending columns [count] from `first` to before `length`."""
    return (first + np.sort(rng.permutation(length - first)[:count])).astype(np.int32)


def masks_behind(length, k, anchors):
    """(clean rows, rows of the masks, columns of their anchors) of packed documents that start anywhere.

    One anchor in five is unused, and then takes the column before it.
    """
    positions, segments = packed(length, 1, (37, 1, 50, 9), (101,))
    rng = np.random.default_rng(4)
    columns = np.stack([choose_anchors(length, anchors, rng) for _ in segments])
    used = rng.random(columns.shape) < 0.8
    columns = np.maximum.accumulate(np.where(used, columns, 0), axis=1)
    position, segment = (np.take_along_axis(x, columns, 1) for x in (positions, segments))
    masks = masks_behind_rows(position, np.where(used, segment, 0), k)
    return stream_rows(CLEAN, positions, segments, 1), masks, np.repeat(columns, k, axis=1)


def multi_token_attend(clean, masks, columns, k, tiles=None):
    inputs = (jnp.asarray(x) for x in (clean.segment, masks.segment, columns))
    return splash.two_stream_attend(*inputs, k, rule=multi_token, tiles=tiles, interpret=True)


MASKS = {  # (L, A, k), (heads, key heads, head_dim), tiles; A k > L but for the first
    "k = 1, every column": ((128, 128, 1), (2, 2, 64), None),
    "k = 2": ((128, 70, 2), (2, 2, 64), Tiles(128, 128)),
    "k = 3": ((115, 50, 3), (2, 1, 64), Tiles(128, 128)),
    "k = 4, 7 heads a key head": ((120, 60, 4), (7, 1, 64), None),
    "k = 8, two groups, tiles that differ": ((128, 33, 8), (4, 2, 64), Tiles(128, 256, 256, 128)),
    "k = 8, one backward kernel": ((120, 40, 8), (2, 1, 128), Tiles(128, 128, fused=True)),
}


@pytest.mark.parametrize("case", MASKS)
def test_multi_token_equals_dense(case):
    (length, anchors, k), heads, tiles = MASKS[case]
    clean, masks, columns = masks_behind(length, k, anchors)
    mask = dense_mask(multi_token, joined(clean, masks))
    assert_equal(multi_token_attend(clean, masks, columns, k, tiles), mask, length + anchors * k, *heads)


def _one_more(query, key):
    return multi_token(query._replace(block=query.block + (key.stream == CLEAN) * query.stream), key)


def _later_masks(query, key):
    return multi_token(query._replace(position=query.position + query.stream), key)


def _other_anchors(query, key):
    both = query.stream & key.stream
    return multi_token(query._replace(block=query.block * (1 - both)), key._replace(block=key.block * (1 - both)))


BEHIND = {
    "masks": (multi_token, masks_behind(120, 4, 60), 4, (4, 2, 64), Tiles(128, 128)),
    "masks, tiles that differ": (multi_token, masks_behind(128, 8, 33), 8, (2, 1, 64), Tiles(128, 256, 256, 128)),
    "masks, one backward kernel": (multi_token, masks_behind(150, 2, 90), 2, (2, 2, 64), Tiles(128, 128, fused=True)),
    "a compact stream": (two_stream, columns_of_clean(256, 128, 8), 8, (2, 1, 64), None),
}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("case", BEHIND)
def test_behind_equals_dense(case, constant):
    """The noisy rows alone, to the keys and values of a pass before; their gradients are 0 where those are constant."""
    rule, (clean, noisy, columns), block_size, (heads, kv_heads, head_dim), tiles = BEHIND[case]
    length, count = clean.segment.shape[1], columns.shape[1]
    mask = dense_mask(rule, noisy, joined(clean, noisy))
    attend = splash.behind_attend(
        *(jnp.asarray(x) for x in (clean.segment, noisy.segment, columns)),
        block_size, rule=rule, constant=constant, tiles=tiles, interpret=True,
    )  # fmt: skip

    def kernel_attend(q, k, v):
        state = k[:, :length], v[:, :length]
        mixed, after = attend(q, k[:, length:], v[:, length:], state)
        assert after is state
        return mixed

    def dense_attend(q, k, v):
        if constant:
            k, v = (jnp.concatenate([jax.lax.stop_gradient(x[:, :length]), x[:, length:]], axis=1) for x in (k, v))
        return dense.attend(q, k, v, mask)

    sizes = (count, heads), (length + count, kv_heads), (length + count, kv_heads)
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(2, *size, head_dim)).astype(np.float32) for size in sizes]
    weights = rng.normal(size=inputs[0].shape).astype(np.float32)
    want, got = (values_and_gradients(attend, inputs, weights) for attend in (dense_attend, kernel_attend))
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5, err_msg=name)
    assert np.abs(want[2][:, :length]).max() == 0 if constant else np.abs(want[2][:, :length]).max() > 0.1


def test_constant_keys_cost_no_backward_pass():
    layout, tiles = Layout(512, 1024, 4, anchored=True), Tiles(128, 128)
    (_, of_q, of_keys), (_, same, fewer) = (splash._schedules(layout, tiles, 512, c) for c in (False, True))
    of_clean, own = 4 * 3 + 4 * 4, 8
    assert [(x.block_mask > 0).sum() for x in (of_q, of_keys, same, fewer)] == [*[of_clean + own] * 3, own]
    assert fewer.block_mask.shape == (1, 1, 12)  # steps of the grid: one a tile of keys


def test_another_mask_is_noticed():
    clean, masks, columns = masks_behind(128, 4, 40)
    rows = joined(clean, masks)
    q, k, v = (np.asarray(jax.random.normal(jax.random.key(i), (2, 288, 1, 64))) for i in range(3))
    got = multi_token_attend(clean, masks, columns, 4)(q, k, v, None)[0]
    for rule in (multi_token, _one_more, _later_masks, _other_anchors):
        want = dense.attend(q, k, v, dense_mask(rule, rows))
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5) == (rule is multi_token), rule


def test_an_anchor_out_of_reach_is_no_number():
    """Rather than the result of the tiles that are visited: the unused anchors behind the last column take none."""
    clean, masks, columns = masks_behind(128, 2, 20)
    columns[0], masks.segment[0] = 127, 0
    masks.segment[0, -6:] = 1, 1, 0, 0, 1, 1  # numbers 17 and 19, which stand at most at columns 125 and 127
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 168, 1, 64)) for i in range(3))
    out = multi_token_attend(clean, masks, columns, 2)(q, k, v, None)[0]
    np.testing.assert_array_equal(np.argwhere(np.isnan(out).any((-2, -1))), [(0, 162), (0, 163)])


@pytest.mark.parametrize(("length", "tiles"), [(128, None), (300, Tiles(128, 128))])
def test_causal_equals_dense(length, tiles):
    positions, segments = packed(length, 1, (37, 1, 50, 9), (101,))
    attend = splash.causal_attend(jnp.asarray(segments), tiles=tiles, interpret=True)
    assert_equal(attend, dense_mask(causal, single_stream_rows(positions, segments)), length, 4, 2, 64)


def test_bfloat16():
    _, segments = packed(128, 4, (90,))
    positions, _ = packed(128, 4, (90,))
    columns = jnp.arange(128)[None]
    attend = splash.two_stream_attend(jnp.asarray(segments), jnp.asarray(segments), columns, 4, interpret=True)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 256, 2, 64), jnp.bfloat16) for i in range(3))
    mask = dense_mask(two_stream, two_stream_rows(positions, segments, 4))
    got, want = attend(q, k, v, None)[0], dense.attend(q, k, v, mask)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=0.03)


@pytest.mark.parametrize("rule", [two_stream, block_diffusion])
@pytest.mark.parametrize(
    ("length", "noisy", "block_size", "xp"),
    [(128, 128, 4, np), (128, 48, 8, np), (120, 60, 3, np), (2**15, 256, 4, np), (128, 48, 8, jnp)],
)
def test_ids_say_what_rows_say(length, noisy, block_size, rule, xp):
    columns = compaction(length, noisy, block_size, np.random.default_rng(2))[None]
    layout = Layout(length, noisy, block_size)
    ids = np.asarray(row_ids(layout, xp.asarray(columns), xp))[0]
    assert ids.dtype == np.int32
    keep = np.r_[:length, layout.start : layout.start + noisy][-1000:]  # noisy rows and the last clean ones
    got = TwoStreamMask(block_size, layout.start, rule)(xp.asarray(ids[keep])[:, None], xp.asarray(keep)[None, :])
    positions = np.arange(length)[None]
    clean = stream_rows(CLEAN, positions, 1 + 0 * positions, block_size)
    rows = joined(clean, stream_rows(NOISY, columns, 1 + 0 * columns, block_size))
    rows = type(rows)(*(field[:, -1000:] for field in rows))
    np.testing.assert_array_equal(got, dense_mask(rule, rows)[0])


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(("length", "anchors", "k"), [(128, 128, 1), (128, 80, 2), (120, 60, 3), (2**15, 2**12, 8)])
def test_ids_say_what_masks_see(length, anchors, k, xp):
    segments = np.ones((1, length), np.int32)
    columns = choose_anchors(length, anchors, np.random.default_rng(2))[None]
    layout = Layout(length, anchors * k, k, anchored=True)
    ids = np.asarray(row_ids(layout, xp.asarray(np.repeat(columns, k, axis=1)), xp))[0]
    assert ids.dtype == np.int32
    keep = np.r_[:length, layout.start : layout.start + anchors * k]
    some = np.random.default_rng(3).permutation(keep.size)[:600] if keep.size > 2000 else np.arange(keep.size)
    some = np.sort(np.r_[some, keep.size - 40 : keep.size])  # the last masks too, of which several have one anchor
    on_ids = TwoStreamMask(k, layout.start, multi_token, anchored=True)
    got = on_ids(xp.asarray(ids[keep[some]])[:, None], xp.asarray(keep[some])[None, :])
    clean = stream_rows(CLEAN, np.arange(length)[None], segments, 1)
    rows = joined(clean, masks_behind_rows(columns, 1 + 0 * columns, k))
    want = dense_mask(multi_token, type(rows)(*(field[:, some] for field in rows)))[0]
    np.testing.assert_array_equal(got, want)


def test_blocks_are_exact():
    columns = np.arange(2**16, dtype=np.int32)
    for block_size in (1, 2, 3, 5, 6, 7, 12, 100, 1023, 4096):
        for xp in (np, jnp):
            blocks = TwoStreamMask(block_size, 0)._block(xp.asarray(columns))
            np.testing.assert_array_equal(blocks, columns // block_size)


def by_tile(mask, reduce, block_q, block_kv):
    q, kv = mask.shape
    return reduce(mask.reshape(q // block_q, block_q, kv // block_kv, block_kv), axis=(1, 3))


@pytest.mark.parametrize(("length", "bound"), [(512, 1.5), (2048, 1.15)])
def test_visits_no_empty_tile(length, bound):
    positions, segments = packed(length, 4, (length,))
    mask = dense_mask(two_stream, two_stream_rows(positions, segments, 4))[0]
    grid = visits(Layout(length, length, 4), 128, 128)
    np.testing.assert_array_equal(grid > 0, by_tile(mask, np.any, 128, 128))
    np.testing.assert_array_equal(grid == 2, by_tile(mask, np.all, 128, 128))
    assert (grid > 0).sum() * 128**2 <= bound * mask.sum()


@pytest.mark.parametrize("rule", [two_stream, block_diffusion])
@pytest.mark.parametrize(("block_q", "block_kv"), [(128, 128), (128, 256), (256, 128)])
@pytest.mark.parametrize(
    ("length", "noisy", "block_size"), [(1024, 512, 4), (1024, 128, 16), (768, 384, 3), (700, 700, 8)]
)
def test_no_needed_tile_is_missed(length, noisy, block_size, block_q, block_kv, rule):
    layout = Layout(length, noisy, block_size, 256, ahead=rule is block_diffusion)
    grid = visits(layout, block_q, block_kv)
    rule_on_ids = TwoStreamMask(block_size, layout.start, rule)
    real = np.zeros(layout.total, bool)
    real[:length] = real[layout.start : layout.start + noisy] = True
    real = real[:, None] & real
    rng, ever = np.random.default_rng(3), np.zeros_like(grid, bool)
    first = np.arange(noisy, dtype=np.int32)
    for columns in (first, first + length - noisy, *(compaction(length, noisy, block_size, rng) for _ in range(20))):
        ids = row_ids(layout, columns[None])[0]
        mask = rule_on_ids(ids[:, None], np.arange(layout.total, dtype=np.int32)[None])
        needed = by_tile(mask & real, np.any, block_q, block_kv)
        assert (grid[needed] > 0).all()
        assert by_tile(mask | ~real, np.all, block_q, block_kv)[grid == 2].all()
        ever |= needed
    alone = ~by_tile(real, np.any, block_q, block_kv)  # tiles of padding, of which each row visits one
    np.testing.assert_array_equal((grid > 0) & ~alone, ever)  # and none is visited that no compaction needs


@pytest.mark.parametrize(
    ("length", "anchors", "k"), [(513, 256, 4), (512, 512, 1), (700, 300, 2), (512, 90, 8), (300, 200, 3), (1024, 8, 8)]
)
def test_no_tile_of_masks_is_missed(length, anchors, k):
    """And none is visited that no choice of anchors needs, in one document."""
    layout = Layout(length, anchors * k, k, 256, anchored=True)
    grids = {sizes: visits(layout, *sizes) for sizes in ((128, 128), (128, 256), (256, 128))}
    real = np.zeros(layout.total, bool)
    real[:length] = real[layout.start : layout.start + anchors * k] = True
    real = real[:, None] & real
    positions = np.arange(length, dtype=np.int32)[None]
    clean = stream_rows(CLEAN, positions, 1 + 0 * positions, 1)
    rng, ever = np.random.default_rng(3), {sizes: np.zeros_like(grid, bool) for sizes, grid in grids.items()}
    choices = [
        np.arange(anchors, dtype=np.int32),
        np.arange(length - anchors, length, dtype=np.int32),
        *(choose_anchors(length, anchors, rng) for _ in range(4)),
        choose_anchors((length + anchors) // 2, anchors, rng),
        choose_anchors(length, anchors, rng, first=(length - anchors) // 2),
    ]
    for columns in choices:
        rows = joined(clean, masks_behind_rows(columns[None], 1 + 0 * columns[None], k))
        mask = np.zeros(real.shape, bool)
        mask[real] = dense_mask(multi_token, rows).reshape(-1)
        for sizes, grid in grids.items():
            needed = by_tile(mask, np.any, *sizes)
            assert (grid[needed] > 0).all()
            assert by_tile(mask | ~real, np.all, *sizes)[grid == 2].all()
            ever[sizes] |= needed
    for sizes, grid in grids.items():
        alone = ~by_tile(real, np.any, *sizes)
        np.testing.assert_array_equal((grid > 0) & ~alone, ever[sizes])


def test_fewer_tiles_of_masks_than_all():
    """Masks see their own tile, and those of the clean stream that an anchor of their number may stand in."""
    grid = visits(Layout(1024, 512, 4, anchored=True), 128, 128) > 0
    assert [part.sum() for part in (grid[:8, :8], grid[:8, 8:], grid[8:, 8:])] == [36, 0, 4]
    assert grid[8:, :8].sum() == 32
    assert (visits(Layout(1024, 4096, 4, anchored=True), 128, 128) > 0)[8:, :8].sum() == 4 * 36


def test_schedule_visits_the_grid():
    """Forward, for keys, and unshrunk: each tile of the grid once, by the indices that the kernel reads."""
    grid = visits(Layout(1024, 512, 4), 128, 256)
    for by_key, shrink in ((False, True), (True, True), (True, False)):
        info = splash._mask_info(grid, by_key=by_key, shrink=shrink)
        seen = np.zeros_like(grid)
        for i, j in np.ndindex(info.block_mask[0].shape):
            at = info.data_next[0, i, j]
            assert 0 <= at < grid.shape[0 if by_key else 1]
            if info.block_mask[0, i, j]:
                seen[(at, j) if by_key else (i, at)] += info.block_mask[0, i, j]
                assert shrink or at == i
        np.testing.assert_array_equal(seen, grid)


def test_long_sequences_are_planned_fast():
    for length in (8192, 2**15):
        tiles = splash.choose_tiles(length, length, 4, 128)
        assert tiles.unit <= 512
        forward, _, _ = splash._schedules(Layout(length, length, 4, tiles.unit), tiles)
        assert forward.block_mask.size < 20_000  # integers of scalar memory


def test_no_square_in_the_program():
    """Nothing of (L+M)² or L·M elements, as a constant or in between."""
    length, noisy = 512, 256
    segments, columns = jnp.ones((1, length), jnp.int32), jnp.arange(noisy)[None]
    attend = splash.two_stream_attend(segments, segments[:, :noisy], columns, 4, tiles=Tiles(128, 128))
    q, k, v = (jnp.zeros((1, length + noisy, h, 64)) for h in (2, 1, 1))
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: attend(q, k, v, None)[0].sum()))(q)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
            for inner in jax.core.jaxprs_in_params(equation.params):
                yield from sizes(inner)

    assert max(sizes(jaxpr.jaxpr)) <= 2 * (length + noisy) * 128  # q, and a row's sums over 128 lanes


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from marsjax.attention import splash
from marsjax.attention.masks import multi_token

segments = jnp.broadcast_to(jnp.repeat(jnp.array([1, 2, 0], jnp.int32), jnp.array([90, 20, 18])), (4, 128))
columns = jnp.broadcast_to(jnp.arange(128), (4, 128))
attend = splash.two_stream_attend(segments, segments, columns, 4, interpret=True)
anchors = jnp.repeat(columns[:, ::2], 2, axis=1)
behind = splash.behind_attend(segments, jnp.repeat(segments[:, ::2], 2, axis=1), anchors, 2, rule=multi_token,
                              constant=True, interpret=True)
q, k, v = (jax.random.normal(jax.random.key(i), (4, 256, h, 64)) for i, h in enumerate((4, 2, 2)))

def total(q, k, v):
    first = attend(q, k, v, None)[0]
    masks = behind(first[:, 128:], k[:, 128:], v[:, 128:], (k[:, :128], v[:, :128]))[0]
    return (first**2).sum() + (masks**2).sum()

def run(q, k, v):
    return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

want = jax.jit(run)(q, k, v)
mesh = jax.make_mesh((2, 2, 2), ("slice", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
with jax.set_mesh(mesh):
    lowered = jax.jit(run).lower(q, k, v)
    assert "manual_computation" in lowered.as_text()
    got = lowered.compile()(q, k, v)
for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
"""


def test_mesh_equals_one_device():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", ON_A_MESH], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_refusals():
    ones = jnp.ones((2, 8), jnp.int32)
    columns = jnp.broadcast_to(jnp.arange(8), (2, 8))
    with pytest.raises(ValueError, match="multiples of 128"):
        Tiles(64, 128)
    with pytest.raises(ValueError, match="8 noisy rows for 4 columns"):
        splash.two_stream_attend(ones[:, :4], ones, columns, 4)
    for masks in (6, 36):
        with pytest.raises(ValueError, match=f"{masks} masks are not 4 behind each of at most 8 anchors"):
            splash.two_stream_attend(ones, *(jnp.ones((2, masks), jnp.int32),) * 2, 4, rule=multi_token)
    with pytest.raises(ValueError, match="6 noisy rows of 8 columns are no multiple of block_size=4"):
        splash.two_stream_attend(ones, ones[:, :6], columns[:, :6], 4)

    def shapes(attend, n, rows, heads, kv_heads):
        inputs = (jax.ShapeDtypeStruct((n, rows, h, 64), jnp.float32) for h in (heads, kv_heads, kv_heads))
        return jax.eval_shape(lambda *x: attend(*x, None)[0], *inputs).shape

    long = splash.causal_attend(jnp.ones((1, 2**15 + 1), jnp.int32), interpret=True)
    with pytest.raises(ValueError, match="above the 32768"):
        shapes(long, 1, 2**15 + 1, 1, 1)
    causal_of = splash.causal_attend
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor"))):
        with pytest.raises(ValueError, match="2 key/value heads do not divide over tensor=4"):
            shapes(causal_of(ones, interpret=True), 2, 8, 4, 2)
        with pytest.raises(ValueError, match="3 rows do not divide over 2"):
            shapes(causal_of(jnp.ones((3, 8), jnp.int32), interpret=True), 3, 8, 4, 4)
        assert shapes(causal_of(ones, interpret=True), 2, 8, 4, 4) == (2, 8, 4, 64)


def test_causal_grid():
    grid = visits(Layout(512, 0, 1), 128, 128)
    mask = CausalMask()(np.arange(512)[:, None], np.arange(512)[None])
    np.testing.assert_array_equal(grid > 0, by_tile(mask, np.any, 128, 128))
    np.testing.assert_array_equal(grid == 2, by_tile(mask, np.all, 128, 128))
