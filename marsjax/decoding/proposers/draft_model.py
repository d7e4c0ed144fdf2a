"""Draft-model speculation: a second, smaller model guesses (arXiv 2604.07023, section 4.6)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from marsjax.decoding import acceptance, plans, step
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.proposers.base import Proposer, Seen

TAKE_ALL = 0.0  # a τ that every prediction of the draft model reaches, also what a high temperature draws


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """The draft model's own cache, which follows the target's text."""

    cursor: jax.Array  # [N] int32, tokens whose keys and values it holds
    cache: Any  # L × [N, K, T, h]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftParams:
    weights: Any
    mask_id: Any  # [] int32


@dataclasses.dataclass(frozen=True)
class DraftModel(Proposer):
    """The decode step itself, run on another network, a few tokens ahead.

    Attributes:
      network: the draft model's. k: drafts a step.
      window: predictions of one of its forwards; above 1 it is a MARS model that drafts with its masks.
      tail: tokens the target may add by τ behind the accepted drafts (`SlotPlan.tail`).
    """

    network: Any
    k: int
    window: int = 1
    tail: int = 1

    @property
    def plan(self) -> plans.SlotPlan:
        # Behind the last draft it never fed come the target's own token and those it added by τ.
        return dataclasses.replace(plans.mars(self.window), name="draft").with_pending(self.window + self.tail)

    @property
    def draft_forwards(self) -> int:
        """Of the draft model, a step of the target."""
        return -(-self.k // self.window)

    @property
    def slack(self) -> int:
        return self.draft_forwards * self.window + self.plan.pending

    def start(self, lanes, capacity):
        return DraftState(jnp.zeros(lanes, jnp.int32), self.network.empty_cache(lanes, capacity))

    def admit(self, mine, new):
        return dataclasses.replace(mine, cursor=jnp.where(new, 0, mine.cursor))

    def prefill(self, network, chunk, params, state, max_chunks):
        own = step.prefill_prompts(self.network, chunk, params.proposer.weights, self._own(state), max_chunks)
        return dataclasses.replace(state, proposer=DraftState(own.cursor, own.cache))

    def propose(self, params, controls, state):
        asked = dataclasses.replace(
            controls,
            tau=jnp.full_like(controls.tau, TAKE_ALL),
            measure=jnp.full_like(controls.measure, acceptance.PROBABILITY),
            limit=jnp.full_like(controls.limit, jnp.iinfo(jnp.int32).max),
            ends=jnp.full_like(controls.ends, -1),
            allowed=_fitted(controls.allowed, self.network.config.vocab_size, False),
            mask_id=params.proposer.mask_id,
        )
        own, logits = self._own(state), []
        strategy, weights = step.Strategy(self.plan), step.Params(params.proposer.weights, ())
        for _ in range(self.draft_forwards):
            own, said = step.step_and_logits(self.network, strategy, weights, asked, own)
            logits.append(said)
        at = state.length[:, None] + jnp.arange(self.k)
        tokens = jnp.take_along_axis(own.tokens, at, 1, mode="clip")
        said = _fitted(jnp.concatenate(logits, 1)[:, : self.k], controls.allowed.shape[0], -jnp.inf)
        broken = jnp.isnan(said).any((1, 2))  # of a draft model that overflowed: the target goes on alone
        guesses = Drafts.of(tokens, logits=jnp.where(broken[:, None, None], 0.0, said)).only(~broken)
        return guesses, DraftState(own.cursor, own.cache)

    def observe(self, network, params, controls, mine, seen: Seen):
        """Keys and values of drafts that were not accepted are those of another text."""
        kept = jnp.minimum(mine.cursor, seen.state.length + seen.accepted)
        return dataclasses.replace(mine, cursor=jnp.where(seen.taken > 0, kept, mine.cursor))

    def resize(self, mine, resized):
        return dataclasses.replace(mine, cache=jax.tree.map(lambda x: resized(x, 2), mine.cache))

    def _own(self, state: "step.State") -> "step.State":
        """The target's text, as the draft model's own decoding."""
        mine = state.proposer
        return dataclasses.replace(state, cursor=mine.cursor, cache=mine.cache, proposer=())


def _fitted(x: jax.Array, vocab: int, fill: Any) -> jax.Array:
    """The last axis cut or filled up to `vocab` rows: tables of one tokenizer may be padded differently."""
    short = max(0, vocab - x.shape[-1])
    return jnp.pad(x[..., :vocab], [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=fill)
