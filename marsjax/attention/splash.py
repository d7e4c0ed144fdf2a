"""Training attention on the TPU: jax's splash attention kernel, forward and backward, with the mask of `masks.py`.

The kernel runs over `[clean, padded | noisy, padded]` in one call and visits only the tiles of its grid that may hold
an allowed pair. Inside a tile it evaluates the mask from two integers a pair: the row's id, which may be traced, and
the key's plain index. Ids of noisy rows carry their column in the clean stream and their place in the noisy one, so
that a compact noisy stream (`marsjax.training.objectives.score_two_streams`) needs no array of masks. Documents are
told apart by the kernel's segment ids; they start at multiples of `block_size` in their row, so that blocks are those
of columns. Under `masks.multi_token` the blocks of noisy rows are those of places instead, `block_size` rows behind
each anchor, and documents start anywhere.

Rows of segment 0 give 0 and send no gradient, as on the dense path (within the kernel they see each other).

Letters in shapes: N rows, L clean and M noisy columns, S = L + M, H query heads, K key/value heads, h head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import AxisType, PartitionSpec

from marsjax.attention.masks import CLEAN, NOISY, Rows, causal, multi_token, two_stream

MAX_LENGTH = 2**15  # a row's column and its place in the noisy stream share an int32 with the stream's sign
LANES = 128
BATCH_AXES, HEAD_AXIS = ("slice", "data", "fsdp"), "tensor"

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Tiles:
    """Rows × keys of one step of the kernel's grid, forward and backward; multiples of 128.

    fused: one backward kernel instead of two. It computes each score once and not twice, but writes a gradient of q
    for every column of tiles, in q's dtype, and visits the grid's empty tiles to zero it.
    """

    q: int
    kv: int
    q_backward: int | None = None
    kv_backward: int | None = None
    fused: bool = False

    def __post_init__(self):
        for size in (self.q, self.kv, *self.backward):
            if size < LANES or size % LANES:
                raise ValueError(f"tiles must be positive multiples of {LANES}, got {self}")

    @property
    def backward(self) -> tuple[int, int]:
        return self.q_backward or self.q, self.kv_backward or self.kv

    @property
    def unit(self) -> int:
        """What each stream is padded to a multiple of, so that no tile straddles the two."""
        return int(np.lcm.reduce((self.q, self.kv, *self.backward)))


@dataclass(frozen=True)
class Layout:
    """The static side of the attention input: `[clean | noisy]`, each padded to a multiple of `unit`; noisy may be 0.

    `noisy` < `length` is a compact stream: whole blocks of the clean one, in ascending order. `ahead`: rows see later
    ones of their own block. `anchored`: a block of noisy rows stands behind a column, its anchor.
    """

    length: int
    noisy: int
    block_size: int
    unit: int = LANES
    ahead: bool = False
    anchored: bool = False

    @property
    def start(self) -> int:
        """Where the noisy rows begin."""
        return -(-self.length // self.unit) * self.unit

    @property
    def total(self) -> int:
        return self.start + -(-self.noisy // self.unit) * self.unit

    @property
    def skipped(self) -> int:
        """How many blocks a noisy row's block may be ahead of its place; how many columns an anchor of its number."""
        if self.anchored:
            return self.length - self.noisy // self.block_size
        return -(-self.length // self.block_size) - -(-self.noisy // self.block_size)

    def join(self, clean: jax.Array, noisy: jax.Array | None = None) -> jax.Array:
        """[N, L, ...] and [N, M, ...] → [N, total, ...], padded with 0."""
        clean = _padded(clean, self.start)
        return clean if noisy is None else jnp.concatenate([clean, self.pad_noisy(noisy)], axis=1)

    def pad_noisy(self, x: jax.Array) -> jax.Array:
        """[N, M, ...] → [N, total - start, ...]."""
        return _padded(x, self.total - self.start)

    def pad(self, x: jax.Array) -> jax.Array:
        """[N, S, ...] → [N, total, ...]."""
        if self.total == self.length + self.noisy:
            return x
        return self.join(x[:, : self.length], x[:, self.length :] if self.noisy else None)

    def cut(self, x: jax.Array) -> jax.Array:
        """[N, total, ...] → [N, S, ...]."""
        if self.total == self.length + self.noisy:
            return x
        return jnp.concatenate([x[:, : self.length], x[:, self.start : self.start + self.noisy]], axis=1)


def _padded(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def row_ids(layout: Layout, columns: Any = None, xp: Any = np):
    """Ids [N, total] int32 of the rows; `columns` [N, M] of the noisy ones, or of their anchors (`two_stream_attend`).

    A clean row's id is its column. A noisy row's is the complement of place · 2**16 + column, and so negative.
    """
    index = xp.arange(layout.total, dtype=xp.int32)
    if columns is None:
        return index[None]
    clean = xp.broadcast_to(index[: layout.start], (columns.shape[0], layout.start))
    place = index[: layout.total - layout.start]
    # Padding stands at its own place: any column would do that lets it see itself.
    padding = xp.broadcast_to(place[layout.noisy :], (columns.shape[0], place.size - layout.noisy))
    columns = xp.concatenate([columns.astype(xp.int32), padding], axis=1)
    return xp.concatenate([clean, ~(place * 2**16 + columns)], axis=1)


@dataclass(frozen=True)
class CausalMask:
    """`masks.causal` on ids; the kernel adds the document term."""

    def __call__(self, rows, keys):
        return causal(Rows(0, rows, 0, 1), Rows(0, keys, 0, 1))


@dataclass(frozen=True)
class TwoStreamMask:
    """A rule of `masks.py` on ids; the kernel adds the document term. Hashable, for the kernel's jit."""

    block_size: int
    start: int
    rule: Callable = two_stream
    anchored: bool = False

    def __call__(self, rows, keys):
        xp = jnp if isinstance(rows, jax.Array) else np
        sign = rows >> 31  # -1 in noisy rows, 0 in clean ones
        rows = rows ^ sign
        column, place = rows & 0xFFFF, rows >> 16
        # A noisy key's column is not known here. But it is as far from the row's column as their places are apart
        # when both are of one block, and what this gives for a key of another block is never in the row's.
        noisy = keys >= self.start
        key_column = keys + xp.where(noisy, column - place - self.start, 0)
        if self.anchored:
            # Blocks are anchors' columns. Masks are told apart by how far their places and the numbers of their anchors
            # are from the row's: of other anchors no more than that they are others.
            numbers = self._block(keys - self.start) - self._block(place)
            block, key_block = column, xp.where(noisy, column + numbers, keys)
        else:
            block, key_block = self._block(column), self._block(key_column)
        query = Rows(-sign, column, block, 1)
        key = Rows(xp.where(noisy, NOISY, CLEAN), key_column, key_block, 1)
        return self.rule(query, key)

    def _block(self, column):
        """column // block_size for 0 <= column < 2**16, with no integer division, which the vector unit lacks.

        Half a column keeps the quotient further from whole numbers than float32 rounds it.
        """
        shift = self.block_size.bit_length() - 1
        if self.block_size == 1 << shift:
            return column >> shift
        return ((column + 0.5) * (1 / self.block_size)).astype(np.int32)


def visits(layout: Layout, block_q: int, block_kv: int) -> np.ndarray:
    """The grid [total / block_q, total / block_kv] of tiles: 0 empty, 1 visited, 2 visited and allowed throughout.

    Documents apart. Right for every compaction: place p of the noisy stream holds a block from p's own to `skipped`
    blocks further on. Without compaction no visited tile is empty. A tile of padding alone counts as one row.
    Anchors: right for every choice of them where each is at most `skipped` columns further on than its number.
    """

    def spans(size):
        at = np.arange(0, layout.total, size)
        noisy = at >= layout.start
        first = np.where(noisy, at - layout.start, at)
        last = np.minimum(first + size, np.where(noisy, layout.noisy, layout.length)) - 1
        return noisy, first, np.maximum(last, first), first + size - 1

    b = layout.block_size
    noisy_q, q_first, q_last, q_end = (x[:, None] for x in spans(block_q))
    noisy_kv, kv_first, kv_last, kv_end = (x[None, :] for x in spans(block_kv))

    clean_clean = ~noisy_q & ~noisy_kv
    noisy_clean = noisy_q & ~noisy_kv
    noisy_noisy = noisy_q & noisy_kv
    shared = np.maximum(q_first // b, kv_first // b) <= np.minimum(q_last // b, kv_last // b)
    one_block = np.minimum(q_first // b, kv_first // b) == np.maximum(q_end // b, kv_end // b)
    reached = kv_first // b <= q_last // b if layout.ahead else kv_first <= q_last
    if layout.anchored:
        some_clean = kv_first <= q_last // b + layout.skipped
        all_clean = False  # unused anchors need not take a column each, so that later ones may stand early
    else:
        some_clean = kv_first // b < q_last // b + layout.skipped
        all_clean = kv_end // b < q_first // b
    some = clean_clean & reached | noisy_clean & some_clean | noisy_noisy & shared & reached
    full = clean_clean & (kv_end <= q_first) | noisy_clean & all_clean | noisy_noisy & one_block & (kv_end <= q_first)
    return some.astype(np.int32) + (some & full)


def _mask_info(grid: np.ndarray, *, by_key: bool = False, shrink: bool = True) -> MaskInfo:
    """The kernel's schedule: for each row of tiles (each column with `by_key`) the tiles it visits, one after another.

    The lists are as long as the longest; what follows a list's end repeats its last tile, so that nothing is fetched.
    """
    grid = grid.T if by_key else grid
    width = int((grid > 0).sum(1).max()) if shrink else grid.shape[1]
    data_next, block_mask = (np.zeros((len(grid), width), np.int32) for _ in range(2))
    for row, tiles in enumerate(grid):
        there = np.flatnonzero(tiles)
        if shrink:
            data_next[row] = np.pad(there, (0, width - there.size), "edge") if there.size else 0
            block_mask[row, : there.size] = tiles[there]
        elif there.size:  # the next tile that is not empty, fetched while empty ones pass
            data_next[row] = there[np.minimum(np.searchsorted(there, np.arange(width)), there.size - 1)]
            block_mask[row] = tiles
    if by_key:
        data_next, block_mask = data_next.T, block_mask.T
    return MaskInfo(data_next[None], None, block_mask[None], None, None)


@lru_cache(maxsize=64)
def _schedules(
    layout: Layout, tiles: Tiles, first: int = 0, constant: bool = False
) -> tuple[MaskInfo, MaskInfo | None, MaskInfo]:
    """(forward, gradient of q, gradient of k and v), of the rows from `first` on; `constant`: see `behind_attend`."""
    forward = _mask_info(visits(layout, tiles.q, tiles.kv)[first // tiles.q :])
    backward = visits(layout, *tiles.backward)[first // tiles.backward[0] :]
    of_q = None if tiles.fused else _mask_info(backward)
    if constant and not tiles.fused:  # the one kernel's tiles are those of the gradient of q, too
        backward = np.where(np.arange(backward.shape[1]) < layout.start // tiles.backward[1], 0, backward)
    return forward, of_q, _mask_info(backward, by_key=True, shrink=not tiles.fused)


@lru_cache(maxsize=64)
def choose_tiles(
    length: int,
    noisy: int,
    block_size: int,
    head_dim: int,
    ahead: bool = False,
    anchored: bool = False,
    behind: bool = False,
) -> Tiles:
    """The tiles of least estimated time: small ones waste less area, large ones fewer steps of the grid.

    Rough figures of a v5e: 0.35 µs a step, and a visited pair costs two products of head_dim (at least a lane's 128)
    at 197 TFLOP/s and some ten passes of the vector unit. Larger than 512 does not fit the backward kernels' memory.
    `behind`: of the noisy rows alone.
    """
    a_pair = 4 * max(head_dim, LANES) / 197e12 + 10e-12

    def seconds(tiles: Tiles) -> float:
        layout = Layout(length, noisy, block_size, tiles.unit, ahead, anchored)
        grid = visits(layout, tiles.q, tiles.kv)[layout.start // tiles.q if behind else 0 :] > 0
        return len(grid) * int(grid.sum(1).max()) * 0.35e-6 + int(grid.sum()) * tiles.q * tiles.kv * a_pair

    return min((Tiles(q, kv) for q in (128, 256, 512) for kv in (128, 256, 512)), key=seconds)


def causal_attend(segments: jax.Array, *, tiles: Tiles | None = None, interpret: bool = False) -> Attend:
    """Causal attention within documents; segments [N, L] int32, 0 where padding.

    Returns:
      (q [N, L, H, h], k, v [N, L, K, h], state) → (mixed [N, L, H, h] in q's dtype, state). Under an ambient mesh
      (`jax.set_mesh`) it runs once on each device, N split over slice, data and fsdp, heads over tensor.
      interpret: run the kernel step by step in plain JAX, on any platform.

    Raises:
      ValueError: from the call, when N or K does not divide over the mesh, or the length exceeds `MAX_LENGTH`.
    """
    return _attend(segments, tiles=tiles, interpret=interpret)


def two_stream_attend(
    clean_segments: jax.Array,
    noisy_segments: jax.Array,
    columns: jax.Array,
    block_size: int,
    *,
    rule: Callable = two_stream,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Attend:
    """Attention over `[clean | noisy]` by a rule of two streams in `masks.py`; see `causal_attend`.

    Args:
      clean_segments: [N, L] int32, 0 where padding. Documents start at multiples of block_size.
      noisy_segments, columns: [N, M] int32, M <= L: the noisy rows' segments and where they stand in the clean
        stream: all columns, or whole blocks of them, ascending in each sequence.

    With `masks.multi_token`, block_size is the number of masks behind an anchor, M = A block_size for A <= L anchors,
    and `columns` are those of the anchors, each block_size times. Anchor number g stands at most at column L - A + g,
    as distinct ascending ones do; unused ones (of segment 0) may share a column if they come first. A mask whose
    anchor is further on gives NaN. Documents start anywhere.
    """
    return _attend(clean_segments, noisy_segments, columns, block_size, rule=rule, tiles=tiles, interpret=interpret)


def behind_attend(
    clean_segments: jax.Array,
    noisy_segments: jax.Array,
    columns: jax.Array,
    block_size: int,
    *,
    rule: Callable = two_stream,
    constant: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Attend:
    """The noisy rows' part of `two_stream_attend`, for a pass of theirs behind that of the clean rows.

    (q [N, M, H, h], k, v [N, M, K, h], state) → (mixed [N, M, H, h], state); state: the clean rows' keys and values
    [N, L, K, h]. `constant`: they get no gradient, and the pass that computes those of keys visits the noisy
    ones alone: 3 products of the backward pass's 7 are left, of a pair with a clean key.
    """
    return _attend(
        clean_segments, noisy_segments, columns, block_size,
        rule=rule, behind=True, constant=constant, tiles=tiles, interpret=interpret,
    )  # fmt: skip


def _attend(
    clean_segments, noisy_segments=None, columns=None, block_size=1,
    *, rule=None, behind=False, constant=False, tiles, interpret,
) -> Attend:  # fmt: skip
    length, noisy = clean_segments.shape[1], 0 if noisy_segments is None else noisy_segments.shape[1]
    anchored = rule is multi_token
    ahead = rule is not None and bool(rule(Rows(CLEAN, 0, 0, 1), Rows(CLEAN, 1, 0, 1)))
    _check(length, noisy, block_size, anchored)

    def attend(q, k, v, state):
        chosen = tiles or choose_tiles(length, noisy, block_size, q.shape[-1], ahead, anchored, behind)
        layout = Layout(length, noisy, block_size, chosen.unit, ahead, anchored)
        if max(layout.start, layout.total - layout.start) > MAX_LENGTH:
            raise ValueError(
                f"{length} clean or {noisy} noisy rows, padded to a multiple of {chosen.unit}, are above the "
                f"{MAX_LENGTH} of splash attention: shorten the sequence, or take another attention"
            )
        mask = CausalMask() if rule is None else TwoStreamMask(block_size, layout.start, rule, anchored)
        first = layout.start if behind else 0
        segments = layout.join(clean_segments, noisy_segments)
        ids = jnp.broadcast_to(row_ids(layout, columns, jnp), segments.shape)

        def run(q, k, v, ids, of_rows, of_keys):
            schedules = _schedules(layout, chosen, first, constant)
            return _run(q, k, v, ids, of_rows, of_keys, mask, schedules, chosen, interpret)

        if behind:
            clean = jax.lax.stop_gradient(state) if constant else state
            q, (k, v) = layout.pad_noisy(q), (layout.join(*pair) for pair in zip(clean, (k, v), strict=True))
        else:
            q, k, v = (layout.pad(x) for x in (q, k, v))
        mixed = _on_mesh(run, q, k)(q, k, v, ids[:, first:], segments[:, first:], segments)
        mixed = mixed[:, :noisy] if behind else layout.cut(mixed)
        if anchored:  # a tile that is not visited would leave keys out in silence
            reached = (columns <= jnp.arange(noisy) // block_size + layout.skipped) | (noisy_segments == 0)
            reached = jnp.pad(reached, ((0, 0), (mixed.shape[1] - noisy, 0)), constant_values=True)
            mixed = jnp.where(reached[..., None, None], mixed, jnp.nan)
        return mixed, state

    return attend


def _check(length: int, noisy: int, block_size: int, anchored: bool) -> None:
    if anchored:
        if noisy % block_size or noisy > length * block_size:
            raise ValueError(
                f"{noisy} masks are not {block_size} behind each of at most {length} anchors, one a column: "
                f"take a multiple of {block_size} up to {length * block_size}"
            )
    elif noisy > length:
        raise ValueError(f"{noisy} noisy rows for {length} columns: there is at most one a column")
    elif noisy < length and noisy % block_size:
        raise ValueError(f"{noisy} noisy rows of {length} columns are no multiple of block_size={block_size}")


def _run(q, k, v, ids, of_rows, of_keys, mask, schedules, tiles: Tiles, interpret: bool) -> jax.Array:
    """On one device: q [N, Q, H, h], k and v [N, total, K, h]; ids and segments of rows [N, Q], of keys [N, total]."""
    q_backward, kv_backward = tiles.backward
    sizes = kernel.BlockSizes(
        block_q=tiles.q,
        block_kv=tiles.kv,
        block_q_dkv=q_backward,
        block_kv_dkv=kv_backward,
        block_q_dq=None if tiles.fused else q_backward,
        block_kv_dq=None if tiles.fused else kv_backward,
        use_fused_bwd_kernel=tiles.fused,
    )

    forward, of_q, of_kv = schedules

    def one(q, k, v, ids, of_rows, of_keys):
        splash = kernel.SplashAttentionKernel(
            forward._replace(q_sequence=ids),
            of_q and of_q._replace(q_sequence=ids),
            of_kv._replace(q_sequence=ids),
            block_sizes=sizes,
            is_mqa=False,  # also runs grouped heads: a step takes one query head and the key head of its group
            save_residuals=False,
            mask_value=kernel.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name="attention",  # for remat policies that keep names
            mask_function=mask,
            interpret=interpret,
        )
        return splash(q, k, v, segment_ids=kernel.SegmentIds(of_rows, of_keys))

    scaled = (q * q.shape[-1] ** -0.5).astype(q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (scaled, k, v))
    mixed = jax.vmap(one)(q, k, v, ids, of_rows, of_keys)
    # Padding sees padding in the kernel. Nothing uses it, but 0 is what the dense path gives, and the gradient that
    # comes back into it is then 0 too.
    return jnp.where((of_rows != 0)[..., None, None], jnp.swapaxes(mixed, 1, 2), 0)


def _on_mesh(run, q, k):
    """`run` under shard_map when there is an ambient mesh: XLA cannot partition a kernel by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:  # none, or within a shard_map: shapes are a device's already
        return run
    batch = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    parts = int(np.prod([mesh.shape[axis] for axis in batch]))
    if q.shape[0] % parts:
        raise ValueError(f"{q.shape[0]} rows do not divide over {parts} = {' × '.join(batch)} of the mesh {mesh.shape}")
    tensor = HEAD_AXIS if HEAD_AXIS in mesh.shape else None
    if tensor and k.shape[2] % mesh.shape[tensor]:
        raise ValueError(
            f"{k.shape[2]} key/value heads do not divide over tensor={mesh.shape[tensor]}: "
            f"take a divisor of {k.shape[2]}"
        )
    heads, rows = PartitionSpec(batch or None, None, tensor, None), PartitionSpec(batch or None, None)
    return jax.shard_map(
        run, in_specs=(heads, heads, heads, rows, rows, rows), out_specs=heads, check_vma=False
    )  # a kernel does not say along which axes its result varies
