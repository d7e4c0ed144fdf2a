"""Multi-token prediction with a gated adapter (arXiv 2507.11851): k masks behind many anchors, in one pass.

Behind an anchor, a row x_i, stand masks at the positions i+1 … i+k; mask j predicts x_{i+j+1}, as the model itself
does k - j + 1 forward passes later at row i+j, its *counterpart*. For k = 2 and anchors at 4 and 5:

    row        1  2  3  4  5  6  7     m1 m2 (behind 4)   m1 m2 (behind 5)
    position   1  2  3  4  5  6  7     5  6               6  7
    sees       itself and before       1-4, m1            1-5, m1
    predicts   2  3  4  5  6  7  8     6  7               7  8

Three terms, each a mean:

    base         cross-entropy of the model's head, over ordinary and mask rows
    sampler      cross-entropy of the sampler head, over the same rows, given the token before (that of the data, or
                 its own choice: `free_running`)
    consistency  the mean over features of (stopgrad(z_t) - z)², z a mask row's hidden state after the last norm and
                 z_t its counterpart's (LCM): for each ordinary row the mean over its mask rows, then over such rows

Where the adapter is gated, ordinary rows are the frozen model's own: their cross-entropy at the base head is a
constant, and left out of the sum (but not of the count).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marsjax.attention.masks import CLEAN, masks_behind_rows, stream_rows
from marsjax.attention.masks import multi_token as rule
from marsjax.models import Decoder, ModelConfig
from marsjax.models.layers import Gate
from marsjax.parallel.sharding import everywhere
from marsjax.training.attend import behind_attend, causal_attend, keeping
from marsjax.training.evaluate import EvalStep, EvalSums, clean_sums, histogram
from marsjax.training.losses import Aim, RowScores, likeliest, score_rows
from marsjax.training.objectives import Forward, Sums, take, target_columns
from marsjax.training.state import Params, rebuild


@dataclass(frozen=True)
class MultiToken:
    """What there is to choose; static under jit.

    masks: k. anchors: of a sequence, drawn for every step among those that have a label; None: all.
    consistency, tv_weight: weights of LCM and of the total variation distance to the counterpart's distribution.
    soft_targets: the counterpart's distribution in place of the token. free_running: see the module.
    """

    masks: int
    anchors: int | None = None
    sampler: bool = True
    consistency: float = 1.0
    soft_targets: bool = False
    tv_weight: float = 0.0
    free_running: bool = False

    @property
    def aim(self) -> Aim:
        return Aim(self.soft_targets, self.tv_weight)


class Drawn(NamedTuple):
    """A batch with its anchors. Leaves lead with the batch's own axes, [..., N]; A anchors, M = A k mask rows."""

    batch: Any
    anchors: jax.Array  # [..., N, A] int32, columns, ascending; those not used come first
    used: jax.Array  # [..., N, A] bool
    weights: jax.Array  # [..., N, M] float32, of the mask rows' labels; 0 where there is none
    consistency: jax.Array  # [..., N, M] float32, of the mask rows, for one common division by `denominator`
    denominator: jax.Array  # [..., N] float32


def draw(batch: Any, key: jax.Array | None, target_rows: int | None, options: MultiToken) -> Drawn:
    """Anchors of every sequence. `target_rows`: at least the rows with a target of any; None: all may have one.

    `key` None: anchors spread over the sequence, always the same.
    """
    k, length = options.masks, batch.tokens.shape[-1]

    def at(x, columns):  # x [..., L] at columns [..., A], those past the end at the last
        return jnp.take_along_axis(x, columns, axis=-1, mode="clip")

    def labelled(columns):
        """[..., A k] weights of the labels of the masks behind the rows at `columns` [..., A]."""
        counterparts = counterparts_of(columns, k)
        own = jnp.repeat(at(batch.segments, columns), k, axis=-1)
        inside = (counterparts < length) & (at(batch.segments, counterparts) == own)
        return jnp.where(inside, at(batch.weights, counterparts), 0)

    every = jnp.broadcast_to(jnp.arange(length), batch.tokens.shape)
    may = (batch.weights != 0) & (labelled(every).reshape(*every.shape, k) != 0).any(-1)
    count = min(length, target_rows or length)
    order = every
    if options.anchors is not None and options.anchors < count:
        count = options.anchors
        # Multiples of the golden ratio, modulo 1: any first few of them are spread evenly.
        order = jnp.mod(every * 0.618034, 1) if key is None else jax.random.uniform(key, batch.tokens.shape)
    chosen = jnp.argsort(jnp.where(may, order, jnp.inf), axis=-1, stable=True)[..., :count]
    used = at(may, chosen)
    anchors = jnp.sort(jnp.where(used, chosen, -1), axis=-1)
    used = anchors >= 0
    anchors = jnp.maximum(anchors, 0)

    weights = jnp.where(jnp.repeat(used, k, axis=-1), labelled(anchors), 0)
    columns = counterparts_of(anchors, k)
    # How many mask rows an ordinary row is the counterpart of, and the weight of such rows.
    asked = _count(columns, weights != 0, length)
    of_rows = jnp.where(asked > 0, batch.weights, 0)
    share = jnp.where(weights != 0, at(of_rows, columns) / jnp.maximum(at(asked, columns), 1), 0)
    denominator = batch.weights.sum(-1) + weights.sum(-1)
    to_mean = denominator.sum() / jnp.maximum(of_rows.sum(), 1e-9)
    return Drawn(batch, anchors.astype(jnp.int32), used, weights, share * to_mean, denominator)


def _count(columns: jax.Array, counts: jax.Array, length: int) -> jax.Array:
    """[..., length] float32, how often each column is among `columns` [..., M] where `counts` [..., M]; of those past
    the end there are none."""
    flat, lead = columns.reshape(-1, columns.shape[-1]), columns.shape[:-1]
    found = jnp.zeros((len(flat), length)).at[jnp.arange(len(flat))[:, None], flat]
    return found.add(counts.reshape(flat.shape).astype(jnp.float32)).reshape(*lead, length)


def counterparts_of(anchors: jax.Array, k: int) -> jax.Array:
    """Columns [..., M] of the ordinary rows that predict what the masks behind `anchors` [..., A] do."""
    return (anchors[..., None] + jnp.arange(1, k + 1)).reshape(*anchors.shape[:-1], -1)


class Scores(NamedTuple):
    """The weighted terms of the loss as sums over rows, before the division by `Drawn.denominator`, with gradients; and
    scores of the mask rows [N, M] and of the ordinary rows at `rows` [N, T], by either head, without."""

    base: jax.Array
    sampler: jax.Array
    consistency: jax.Array
    of_masks: RowScores
    of_ordinary: RowScores | None
    of_sampler: RowScores | None
    rows: jax.Array

    @property
    def total(self) -> jax.Array:
        return self.base + self.consistency + self.sampler


def multi_token(model: Decoder, drawn: Drawn, target_rows: int | None, options: MultiToken, forward: Forward) -> Sums:
    """The loss of one microbatch. `target_rows`: as in `draw`."""
    scores = score(model, drawn, target_rows, options, forward)
    terms = {"mask": scores.base, "consistency": scores.consistency}
    if options.sampler:
        terms["sampler"] = scores.sampler
    return Sums(scores.total, drawn.denominator.sum(), terms)


def score(
    model: Decoder,
    drawn: Drawn,
    target_rows: int | None,
    options: MultiToken,
    forward: Forward,
    *,
    with_ordinary: bool | None = None,
) -> Scores:
    """`with_ordinary`: whether the base head looks at the ordinary rows; None: where they can be trained."""
    batch, k, adapter = drawn.batch, options.masks, model.config.adapter
    assert adapter is not None
    assert model.masks is not None
    with_ordinary = not adapter.gated if with_ordinary is None else with_ordinary
    clean = stream_rows(CLEAN, batch.positions, batch.segments, 1)
    segments = jnp.where(drawn.used, take(batch.segments, drawn.anchors), 0)
    masks = masks_behind_rows(take(batch.positions, drawn.anchors), segments, k, jnp)
    how: dict[str, Any] = {"dtype": forward.dtype, "remat": forward.remat}

    # Ordinary rows see no masks, so they go first, and the masks see the keys and values they leave. With a gated
    # adapter nothing in that pass is trained, and the backward pass is of the mask rows alone.
    hidden, kept = model(
        batch.tokens,
        positions=batch.positions,
        attend=keeping(causal_attend(clean, forward.attention, interpret=forward.interpret)),
        **how,
    )
    count = masks.position.shape[1]
    ranks = jnp.broadcast_to(jnp.arange(count) % k, masks.position.shape)
    z, _ = model(
        embeddings=model.masks(ranks, forward.dtype),
        positions=masks.position,
        attend=behind_attend(
            clean, masks, k, forward.attention, rule, columns=jnp.repeat(drawn.anchors, k, axis=1),
            constant=adapter.gated, interpret=forward.interpret,
        ),
        layer_states=kept,
        gate=Gate(count, count),
        **how,
    )  # fmt: skip

    rows = target_columns(batch, 1, target_rows)
    columns = jnp.minimum(counterparts_of(drawn.anchors, k), batch.tokens.shape[1] - 1)
    counterpart = jax.lax.stop_gradient(take(hidden, columns))
    squares = jnp.square((counterpart - z).astype(jnp.float32)).mean(-1)
    consistency = options.consistency * (drawn.consistency * squares).sum()

    both = jnp.concatenate([columns, rows], axis=1)  # mask rows, then ordinary ones; each predicts what a column does
    ordinary = take(hidden, rows)
    weights = jnp.concatenate([drawn.weights, take(batch.weights, rows)], axis=1)
    targets = take(batch.targets, both)
    teacher = take(hidden, both) if options.aim.needs_teacher else None

    def scored(states: jax.Array, upto: int) -> tuple[jax.Array, RowScores]:
        some = (x[:, :upto] for x in (states, targets, weights != 0, weights))
        taught = None if teacher is None else teacher[:, :upto]
        head: dict[str, Any] = {"aim": options.aim, "train_kernel": False, "chunk_bytes": forward.chunk_bytes}
        return score_rows(*model.head_kernel, *some, teacher=taught, **head)

    states = jnp.concatenate([z, ordinary], axis=1)
    base, found = scored(states, both.shape[1] if with_ordinary else count)
    of_masks, of_ordinary = (RowScores(*(x[:, part] for x in found)) for part in (slice(count), slice(count, None)))
    of_sampler, sampler = None, jnp.zeros(())
    if options.sampler:
        assert model.sampler is not None
        before = take(batch.tokens, both)
        if options.free_running:
            before = jnp.concatenate([_own_choices(model, z, before[:, :count], k, forward), before[:, count:]], axis=1)
        sampler, of_sampler = scored(model.sampler(model.embed(before, forward.dtype), states), both.shape[1])
    return Scores(base, sampler, consistency, of_masks, of_ordinary if with_ordinary else None, of_sampler, rows)


def _own_choices(model: Decoder, z: jax.Array, before: jax.Array, k: int, forward: Forward) -> jax.Array:
    """Before the first mask of each anchor the token of the data, before the others what the sampler chose there."""
    assert model.sampler is not None
    z, given = (x.reshape(len(x), -1, k, *x.shape[2:]) for x in (jax.lax.stop_gradient(z), before))
    chosen = [given[..., 0]]
    for rank in range(k - 1):
        states = model.sampler(model.embed(chosen[-1], forward.dtype), z[:, :, rank])
        chosen.append(likeliest(*model.head_kernel, states, chunk_bytes=forward.chunk_bytes))
    return jnp.stack(chosen, axis=-1).reshape(before.shape)


def make_eval_step(config: ModelConfig, *, options: MultiToken, forward: Forward, unroll: bool = False) -> EvalStep:
    """As `marsjax.training.evaluate.make_eval_step`, with the same anchors of a sequence at every evaluation.

    The loss is that of training, with the ordinary rows' part; `sampler_offsets` are the sampler head's.
    """

    def eval_step(params: Params, batch: Any, target_rows: int | None):
        drawn = draw(batch, None, target_rows, options)
        scores = score(rebuild(config, params, unroll=unroll), drawn, target_rows, options, forward, with_ordinary=True)
        assert scores.of_ordinary is not None
        k, count = options.masks, drawn.weights.shape[1]
        offsets = jnp.where(drawn.weights != 0, jnp.arange(count) % k + 2, 0)
        of_ar = clean_sums(batch, take(batch.weights, scores.rows), scores.of_ordinary)
        cells = {"mask": histogram(scores.of_masks, offsets, k + 1)}
        if scores.of_sampler is not None:
            of_masks = RowScores(*(x[:, :count] for x in scores.of_sampler))
            cells["sampler"] = histogram(of_masks, offsets, k + 1)
        losses = {"loss": (scores.total, drawn.denominator.sum()), **of_ar.losses}
        return everywhere(EvalSums(losses, {**cells, **of_ar.offsets}))

    return jax.jit(eval_step, static_argnums=2)
