"""Drafts: guesses that a step verifies, so that its output is the model's own.

A *proposer* (`marsjax.decoding.proposers`) makes them, `marsjax.decoding.acceptance.walk` decides on them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from marsjax.decoding.plans import SlotPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """The guesses for the positions behind each row's last token. D may be 0."""

    tokens: jax.Array  # [N, D] int32
    confidence: jax.Array  # [N, D] float32, of their proposal; τ may accept them for it, never if NaN
    count: jax.Array  # [N] int32, how many there are; the rest is void
    parents: jax.Array | None = None  # [N, D] int32, the head each hangs on; None: as the plan says
    logits: jax.Array | None = None  # [N, D, V], what they were sampled from; None: they were certain to be proposed

    @classmethod
    def of(cls, tokens, *, confidence=None, count=None, parents=None, logits=None) -> "Drafts":
        rows, drafts = tokens.shape
        confidence = jnp.full(tokens.shape, jnp.nan, jnp.float32) if confidence is None else confidence
        count = jnp.full(rows, drafts, jnp.int32) if count is None else count
        return cls(tokens, confidence, count, parents, logits)

    def only(self, rows: jax.Array) -> "Drafts":
        """Those of `rows` [N] bool; the others have none."""
        return dataclasses.replace(self, count=jnp.where(rows, self.count, 0))


def none(rows: int, plan: SlotPlan | None = None) -> Drafts:
    """No drafts, in the arrays of a plan."""
    tokens = jnp.zeros((rows, plan.drafts if plan is not None else 0), jnp.int32)
    parents = jnp.zeros_like(tokens) if plan is not None and plan.dynamic else None
    return Drafts.of(tokens, count=jnp.zeros(rows, jnp.int32), parents=parents)
