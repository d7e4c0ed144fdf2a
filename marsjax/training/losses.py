"""Cross-entropy against a large vocabulary, a chunk of rows at a time, on the rows that have a target.

With 150k tokens the logits of a whole batch are the largest array of training by far. They are never made: each device
takes the rows it holds in chunks under a byte budget. The loss is a weighted sum with known weights, so a chunk's
gradients follow from its logits at once, and the backward pass has nothing to compute again.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from marsjax.models.decoder import logits_of
from marsjax.parallel.sharding import batch_axes, spec

DEFAULT_CHUNK_BYTES = 256 * 2**20


# Chunks are no larger than this part of the rows, so that there are some to skip; but a chunk's share of the head's
# gradient is added to all of it, which few rows do not pay for.
_PARTS, _LEAST_ROWS = 4, 256


@dataclass(frozen=True)
class Aim:
    """What a row's distribution q is drawn to: its target, by cross-entropy; with a teacher's distribution p of the
    next token, also or instead to that.

    soft: cross-entropy against p, Σ -p log q, in place of the target's.
    tv_weight: weight of the total variation distance Σ |p - q| / 2 beside it: what is left to 1 of the chance that a
    token drawn from q is accepted as one of p (arXiv 2211.17192).
    """

    soft: bool = False
    tv_weight: float = 0.0

    @property
    def needs_teacher(self) -> bool:
        return self.soft or self.tv_weight > 0


class RowScores(NamedTuple):
    """What the head says about each row; all [N, S] float32, 0 where the row is not `wanted`. Without gradients. The
    cross-entropy is that of the target, whatever is trained."""

    cross_entropy: jax.Array
    correct: jax.Array
    confidence: jax.Array


def likeliest(kernel: jax.Array, vocab_axis: int, hidden: jax.Array, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES):
    """The likeliest token [N, S] int32 behind each row of `hidden` [N, S, D]; kernel as in `score_rows`."""
    n, rows, size = hidden.shape
    count = min(rows, max(1, chunk_bytes // (4 * n * kernel.shape[vocab_axis])))
    parts = -(-rows // count)
    hidden = jnp.pad(hidden, ((0, 0), (0, parts * count - rows), (0, 0))).reshape(n, parts, count, size)
    best = jax.lax.map(lambda x: logits_of(x, kernel, vocab_axis).argmax(-1), jnp.moveaxis(hidden, 1, 0))
    return jnp.moveaxis(best, 0, 1).reshape(n, -1)[:, :rows].astype(jnp.int32)


class _How(NamedTuple):
    vocab_axis: int
    chunk_bytes: int
    train_kernel: bool
    aim: Aim


def score_rows(
    kernel: jax.Array,
    vocab_axis: int,
    hidden: jax.Array,
    targets: jax.Array,
    wanted: jax.Array,
    weights: jax.Array,
    *,
    teacher: jax.Array | None = None,
    aim: Aim = Aim(),
    train_kernel: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[jax.Array, RowScores]:
    """(Σ weights · loss over the `wanted` rows, a float32 scalar; scores of those rows). The loss is by default the
    cross-entropy of the targets.

    Only the sum has gradients, for the head and `hidden`. Wanted rows are moved to the front, and chunks without any
    are skipped: a prompt costs no head. Over a mesh that is set, devices work on their own rows, with the head gathered
    once.

    Args:
      kernel: the head [D, V], or with vocab_axis 0 the embedding table [V, D].
      hidden: [N, S, D]. targets: [N, S] int32. wanted: [N, S] bool. weights: [N, S] float32.
      teacher: [N, S, D], hidden states whose logits are the teacher's, for an `aim` that needs one. No gradient.
      train_kernel: False: the head gets no gradient, and none is computed.
      chunk_bytes: upper bound of one chunk's float32 logits on a device; at least one row is taken.
    """
    rows: tuple[jax.Array, ...] = (hidden, targets, wanted, weights)
    if aim.needs_teacher:
        assert teacher is not None
        rows = (*rows, jax.lax.stop_gradient(teacher))
    return _score(_How(vocab_axis, chunk_bytes, train_kernel, aim), kernel, *rows)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(how: _How, kernel, *rows):
    total, scores, _ = _by_device(False, how, kernel, *rows)
    return total, scores


def _score_forward(how: _How, kernel, *rows):
    total, scores, gradients = _by_device(True, how, kernel, *rows)
    return (total, scores), (*gradients, jnp.zeros((), kernel.dtype), (None,) * (len(rows) - 1))


def _score_backward(how: _How, gradients, cotangents):
    of_kernel, of_hidden, like_kernel, others = gradients
    scale = cotangents[0]
    of_kernel = (of_kernel * scale).astype(like_kernel.dtype) if how.train_kernel else None
    return of_kernel, (of_hidden * scale).astype(of_hidden.dtype), *others


_score.defvjp(_score_forward, _score_backward)


def _by_device(with_gradients: bool, how: _How, kernel, *rows):
    """Each device's rows on their own; one gathering of the head, and one reduction of its gradient."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else batch_axes(mesh, rows[0].shape[0])
    run = partial(_chunks, with_gradients, how)
    if not axes:
        return run(kernel, *rows)
    logical = ("vocab", "embed") if how.vocab_axis == 0 else ("embed", "vocab")
    split = [axis if axis in axes else None for axis in spec(logical, kernel.shape, mesh)]  # `tensor` stays automatic
    kernel_spec, row_spec = PartitionSpec(*split), PartitionSpec(axes)
    embed_axis = 1 - how.vocab_axis
    gathered = split[embed_axis]

    def local(kernel, *rows):
        kernel = kernel.astype(rows[0].dtype)
        if gathered is not None:
            kernel = jax.lax.all_gather(kernel, gathered, axis=embed_axis, tiled=True)
        total, scores, (of_kernel, of_hidden) = run(kernel, *rows)
        if of_kernel is not None:
            if gathered is not None:
                of_kernel = jax.lax.psum_scatter(of_kernel, gathered, scatter_dimension=embed_axis, tiled=True)
            if others := tuple(axis for axis in axes if axis != gathered):
                of_kernel = jax.lax.psum(of_kernel, others)
        return jax.lax.psum(total, axes), scores, (of_kernel, of_hidden)

    of_kernel_spec = kernel_spec if with_gradients and how.train_kernel else None
    out_specs = (PartitionSpec(), row_spec, (of_kernel_spec, row_spec if with_gradients else None))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(kernel_spec, *[row_spec] * len(rows)),
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )(kernel, *rows)


def _chunks(with_gradients: bool, how: _How, kernel, *rows):
    """(total, scores, (gradient of the kernel, float32, or None; gradient of `hidden`, or None))."""
    chunk_bytes, vocab_axis = how.chunk_bytes, how.vocab_axis
    with_kernel = with_gradients and how.train_kernel
    shape = rows[0].shape[:2]
    rows = tuple(jnp.reshape(x, (-1, *x.shape[2:])) for x in rows)
    count = len(rows[0])
    size = min(count, max(1, chunk_bytes // (4 * kernel.shape[vocab_axis])), max(_LEAST_ROWS, -(-count // _PARTS)))
    chunks = -(-count // size)
    size = -(-count // chunks)
    order = jnp.argsort(~rows[2], stable=True)  # those that are wanted first

    def to_chunks(x):
        x = jnp.pad(jnp.take(x, order, axis=0), ((0, chunks * size - count), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(chunks, size, *x.shape[1:])

    def body(carry, chunk):
        total, of_kernel = carry

        def work(of_kernel):
            more, scores, more_of_kernel, of_hidden = _chunk(with_gradients, how, kernel, *chunk)
            return total + more, of_kernel + more_of_kernel if with_kernel else None, scores, of_hidden

        def skip(of_kernel):
            nothing = RowScores(*(jnp.zeros(size, jnp.float32),) * 3)
            return total, of_kernel, nothing, jnp.zeros_like(chunk[0]) if with_gradients else None

        total, of_kernel, scores, of_hidden = jax.lax.cond(chunk[2].any(), work, skip, of_kernel)
        return (total, of_kernel), (scores, of_hidden)

    start = (jnp.zeros(()), jnp.zeros(kernel.shape, jnp.float32) if with_kernel else None)
    (total, of_kernel), (scores, of_hidden) = jax.lax.scan(body, start, tuple(to_chunks(x) for x in rows))
    back = jnp.argsort(order)

    def from_chunks(x):
        x = jnp.take(x.reshape(chunks * size, *x.shape[2:]), back, axis=0)
        return x.reshape(*shape, *x.shape[1:])

    scores, of_hidden = jax.tree.map(from_chunks, (scores, of_hidden))
    return total, scores, (of_kernel, of_hidden)


def _chunk(with_gradients: bool, how: _How, kernel, hidden, targets, wanted, weights, teacher=None):
    """(total, scores, gradient of the kernel, gradient of `hidden`) of one chunk [C]."""
    vocab_axis, aim = how.vocab_axis, how.aim
    logits = logits_of(hidden, kernel, vocab_axis)
    top = logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    mass = exponentials.sum(-1)
    # One-hot rather than a gather: it splits over a sharded vocabulary.
    hit = targets[..., None] == jnp.arange(logits.shape[-1])
    chosen = jnp.where(hit, logits - top, 0.0).sum(-1)
    scores = RowScores(
        jnp.where(wanted, jnp.log(mass) - chosen, 0.0),
        jnp.where(wanted, jnp.argmax(logits, -1) == targets, False).astype(jnp.float32),
        jnp.where(wanted, 1 / mass, 0.0),
    )
    weights = jnp.where(wanted, weights, 0.0)
    aims = hit
    if teacher is not None:
        p, q = jax.nn.softmax(logits_of(teacher, kernel, vocab_axis)), exponentials / mass[..., None]
        distance = jnp.abs(p - q).sum(-1) / 2
    loss = scores.cross_entropy
    if aim.soft:
        aims, loss = p, jnp.log(mass) - (p * (logits - top)).sum(-1)
    if aim.tv_weight:
        loss = loss + aim.tv_weight * distance
    total = (weights * loss).sum()
    if not with_gradients:
        return total, scores, None, None
    of_logits = exponentials * (weights / mass)[..., None] - aims * weights[..., None]
    if aim.tv_weight:
        towards = jnp.sign(q - p) / 2
        slope = q * (towards - (q * towards).sum(-1, keepdims=True))
        of_logits += aim.tv_weight * weights[..., None] * slope
    of_logits = of_logits.astype(hidden.dtype)
    kernel = kernel.astype(hidden.dtype)
    of_hidden = jax.lax.dot_general(of_logits, kernel, (((1,), (vocab_axis,)), ((), ())))
    if not how.train_kernel:
        return total, scores, None, of_hidden
    left, right = (of_logits, hidden) if vocab_axis == 0 else (hidden, of_logits)
    of_kernel = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return total, scores, of_kernel, of_hidden
