"""Drafts: guesses that the next step verifies, so that its output is the model's own (self-verification).

A *proposer* makes them out of what a step computed; `marsjax.decoding.acceptance.verify` decides on them.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.decoding import acceptance, sampling
from marsjax.decoding.plans import SlotPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """The guesses for the positions behind each row's last token. k may be 0."""

    tokens: jax.Array  # [N, k] int32
    confidence: jax.Array  # [N, k] float32, of their proposal; τ may accept them for it
    count: jax.Array  # [N] int32, how many there are; the rest is void


def none(rows: int, k: int) -> Drafts:
    zeros = jnp.zeros((rows, k), jnp.int32)
    return Drafts(zeros, jnp.zeros((rows, k), jnp.float32), jnp.zeros(rows, jnp.int32))


def from_masks(
    plan: SlotPlan,
    controls,
    drafts: Drafts,
    hidden: jax.Array,
    accepted: jax.Array,
    length: jax.Array,
    logits_of: Callable[[jax.Array], jax.Array],
) -> Drafts:
    """New drafts from the masks behind the last accepted slot; none if no masks saw exactly what was accepted.

    Args:
      drafts: those of this step. accepted: [N] int32, how many of them were.
      hidden: [N, S, ...] of this step's slots. logits_of: hidden rows [N, k, ...] → logits [N, k, V].
      length: [N] int32, tokens known after this step.
    """
    table = np.asarray([group or (0,) * plan.drafts for group in plan.groups], np.int32)  # [k + 1, k]
    has_masks = np.asarray([bool(group) for group in plan.groups])
    # Masks behind an absent draft stand, in effect, behind the last one that is there.
    behind = jnp.minimum(jnp.arange(plan.drafts + 1), drafts.count[:, None])
    fits = (behind == accepted[:, None]) & has_masks
    group = fits.argmax(1)
    rows = jnp.asarray(table)[group]  # [N, k]
    chosen_hidden = jnp.take_along_axis(hidden, rows.reshape(*rows.shape, *(1,) * (hidden.ndim - 2)), axis=1)
    logits = logits_of(chosen_hidden)
    tokens = sampling.choose(
        logits,
        length[:, None] + jnp.arange(plan.drafts),
        # Coupled rows guess with the noise of the position, which the model's own choice will meet again. Rejection is
        # exact for a draft that is certain to be proposed: the likeliest token.
        temperature=jnp.where(controls.rejection, 0.0, controls.temperature),
        top_k=controls.top_k,
        top_p=controls.top_p,
        seed=controls.seed,
    )
    confidence = acceptance.confidence(logits, tokens, controls.measure)
    count = jnp.where(fits.any(1), plan.drafts, 0).astype(jnp.int32)  # a weak type would compile again
    return Drafts(tokens, confidence, count)
