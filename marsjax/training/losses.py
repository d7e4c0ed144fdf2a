"""Cross-entropy against a large vocabulary, a chunk of rows at a time, on the rows that have a target.

With 150k tokens the logits of a whole batch are the largest array of training by far. They are never made: each device
takes the rows it holds in chunks under a byte budget. The loss is a weighted sum with known weights, so a chunk's
gradients follow from its logits at once, and the backward pass has nothing to compute again.
"""

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


class RowScores(NamedTuple):
    """What the head says about each row; all [N, S] float32, 0 where the row is not `wanted`. Without gradients."""

    cross_entropy: jax.Array
    correct: jax.Array
    confidence: jax.Array


def score_rows(
    kernel: jax.Array,
    vocab_axis: int,
    hidden: jax.Array,
    targets: jax.Array,
    wanted: jax.Array,
    weights: jax.Array,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[jax.Array, RowScores]:
    """(Σ weights · cross-entropy over the `wanted` rows, a float32 scalar; scores of those rows).

    Only the sum has gradients, for the head and `hidden`. Wanted rows are moved to the front, and chunks without any
    are skipped: a prompt costs no head. Over a mesh that is set, devices work on their own rows, with the head gathered
    once.

    Args:
      kernel: the head [D, V], or with vocab_axis 0 the embedding table [V, D].
      hidden: [N, S, D]. targets: [N, S] int32. wanted: [N, S] bool. weights: [N, S] float32.
      chunk_bytes: upper bound of one chunk's float32 logits on a device; at least one row is taken.
    """
    return _score(chunk_bytes, vocab_axis, kernel, hidden, targets, wanted, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _score(chunk_bytes, vocab_axis, kernel, hidden, targets, wanted, weights):
    total, scores, _ = _by_device(False, chunk_bytes, vocab_axis, kernel, hidden, targets, wanted, weights)
    return total, scores


def _score_forward(chunk_bytes, vocab_axis, kernel, hidden, targets, wanted, weights):
    total, scores, gradients = _by_device(True, chunk_bytes, vocab_axis, kernel, hidden, targets, wanted, weights)
    return (total, scores), (*gradients, jnp.zeros((), kernel.dtype))


def _score_backward(chunk_bytes, vocab_axis, gradients, cotangents):
    of_kernel, of_hidden, like_kernel = gradients
    scale = cotangents[0]
    return (of_kernel * scale).astype(like_kernel.dtype), (of_hidden * scale).astype(of_hidden.dtype), None, None, None


_score.defvjp(_score_forward, _score_backward)


def _by_device(with_gradients: bool, chunk_bytes: int, vocab_axis: int, kernel, *rows):
    """Each device's rows on their own; one gathering of the head, and one reduction of its gradient."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else batch_axes(mesh, rows[0].shape[0])
    run = partial(_chunks, with_gradients, chunk_bytes, vocab_axis)
    if not axes:
        return run(kernel, *rows)
    logical = ("vocab", "embed") if vocab_axis == 0 else ("embed", "vocab")
    split = [axis if axis in axes else None for axis in spec(logical, kernel.shape, mesh)]  # `tensor` stays automatic
    kernel_spec, row_spec = PartitionSpec(*split), PartitionSpec(axes)
    embed_axis = 1 - vocab_axis
    gathered = split[embed_axis]

    def local(kernel, *rows):
        kernel = kernel.astype(rows[0].dtype)
        if gathered is not None:
            kernel = jax.lax.all_gather(kernel, gathered, axis=embed_axis, tiled=True)
        total, scores, gradients = run(kernel, *rows)
        if gradients is not None:
            of_kernel, of_hidden = gradients
            if gathered is not None:
                of_kernel = jax.lax.psum_scatter(of_kernel, gathered, scatter_dimension=embed_axis, tiled=True)
            if others := tuple(axis for axis in axes if axis != gathered):
                of_kernel = jax.lax.psum(of_kernel, others)
            gradients = of_kernel, of_hidden
        return jax.lax.psum(total, axes), scores, gradients

    out_specs = (PartitionSpec(), row_spec, (kernel_spec, row_spec) if with_gradients else None)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(kernel_spec, *[row_spec] * len(rows)),
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )(kernel, *rows)


def _chunks(with_gradients: bool, chunk_bytes: int, vocab_axis: int, kernel, *rows):
    """(total, scores, (gradient of the kernel, float32; gradient of `hidden`) or None)."""
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
            more, scores, more_of_kernel, of_hidden = _chunk(with_gradients, vocab_axis, kernel, *chunk)
            return total + more, of_kernel + more_of_kernel if with_gradients else None, scores, of_hidden

        def skip(of_kernel):
            nothing = RowScores(*(jnp.zeros(size, jnp.float32),) * 3)
            return total, of_kernel, nothing, jnp.zeros_like(chunk[0]) if with_gradients else None

        total, of_kernel, scores, of_hidden = jax.lax.cond(chunk[2].any(), work, skip, of_kernel)
        return (total, of_kernel), (scores, of_hidden)

    start = (jnp.zeros(()), jnp.zeros(kernel.shape, jnp.float32) if with_gradients else None)
    (total, of_kernel), (scores, of_hidden) = jax.lax.scan(body, start, tuple(to_chunks(x) for x in rows))
    back = jnp.argsort(order)

    def from_chunks(x):
        x = jnp.take(x.reshape(chunks * size, *x.shape[2:]), back, axis=0)
        return x.reshape(*shape, *x.shape[1:])

    scores, of_hidden = jax.tree.map(from_chunks, (scores, of_hidden))
    return total, scores, (of_kernel, of_hidden) if with_gradients else None


def _chunk(with_gradients: bool, vocab_axis: int, kernel, hidden, targets, wanted, weights):
    """(total, scores, gradient of the kernel, gradient of `hidden`) of one chunk [C]."""
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
    total = (weights * scores.cross_entropy).sum()
    if not with_gradients:
        return total, scores, None, None
    of_logits = exponentials * (weights / mass)[..., None] - jnp.where(hit, weights[..., None], 0.0)
    of_logits = of_logits.astype(hidden.dtype)
    kernel = kernel.astype(hidden.dtype)
    of_hidden = jax.lax.dot_general(of_logits, kernel, (((1,), (vocab_axis,)), ((), ())))
    left, right = (of_logits, hidden) if vocab_axis == 0 else (hidden, of_logits)
    of_kernel = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return total, scores, of_kernel, of_hidden
