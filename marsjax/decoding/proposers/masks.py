"""Self-speculation: the masks behind the last accepted slot propose what the next step verifies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.decoding import acceptance, drafts, sampling
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.plans import SlotPlan
from marsjax.decoding.proposers import trees
from marsjax.decoding.proposers.base import Proposer, Seen
from marsjax.decoding.proposers.priors import Prior
from marsjax.decoding.proposers.probing import Probe, ProbeParams
from marsjax.decoding.step import sampling_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskState:
    drafts: Drafts  # for the next step
    vectors: Any  # of the probe; () where the masks are a token of their own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskParams:
    probe: ProbeParams | None = None
    prior: Prior | None = None  # of a tree's candidates


@dataclasses.dataclass(frozen=True)
class Masks(Proposer):
    """Drafts out of this model's own masks.

    Attributes:
      tree: how candidates become a tree; None: the likeliest token of each mask, in a row.
      probe: what the masks are in a model that has no mask token.
    """

    plan: SlotPlan
    tree: trees.Static | trees.Dynamic | None = None
    probe: Probe | None = None

    def start(self, lanes, capacity):
        vectors = self.probe.start(lanes) if self.probe is not None else ()
        return MaskState(drafts.none(lanes, self.plan), vectors)

    def admit(self, mine, new):
        return dataclasses.replace(mine, drafts=mine.drafts.only(~new))

    def prefill(self, network, chunk, params, state, max_chunks):
        if self.probe is None:
            return state
        vectors = self.probe.prefill(network, params.target, params.proposer.probe, state, state.proposer.vectors)
        return dataclasses.replace(state, proposer=dataclasses.replace(state.proposer, vectors=vectors))

    def propose(self, params, controls, state):
        return state.proposer.drafts, state.proposer

    def masks(self, mine):
        return self.probe.masks(mine.vectors) if self.probe is not None else None

    def observe(self, network, params, controls, mine, seen: Seen):
        """None if no masks saw exactly what was accepted."""
        rows, fits = self._asked(seen)
        index = rows.reshape(*rows.shape, *(1,) * (seen.hidden.ndim - 2))
        logits = seen.logits_of(jnp.take_along_axis(seen.hidden, index, axis=1))
        positions = seen.length[:, None] + jnp.arange(rows.shape[1])
        # Coupled rows guess with the noise of the position, which the model's own choice will meet again. Rejection is
        # exact for a draft that is certain to be proposed: the likeliest token.
        how = sampling_of(controls) | {"temperature": jnp.where(controls.rejection, 0.0, controls.temperature)}
        if self.tree is None:
            tokens = sampling.choose(logits, positions, **how)
            made = Drafts.of(tokens, confidence=acceptance.confidence(logits, tokens, controls.measure))
        else:
            last = jnp.take_along_axis(seen.emitted, jnp.maximum(seen.taken - 1, 0)[:, None], 1)[:, 0]
            noisy = sampling.perturbed(logits, positions, **how)
            made = self.tree.of(seen, controls, logits, noisy, last, params.proposer.prior)
        vectors = mine.vectors
        if self.probe is not None:
            vectors = self.probe.observe(network, params.target, params.proposer.probe, vectors, seen)
        return MaskState(made.only(fits), vectors)

    def _asked(self, seen: Seen) -> tuple[jax.Array, jax.Array]:
        """(slots [N, k] of the masks behind the last accepted slot, whether there are such [N])."""
        plan = self.plan
        table = np.asarray([group or (0,) * plan.asks for group in plan.groups], np.int32)  # [H, k]
        # Masks behind an absent draft stand, in effect, behind the last one that is there.
        behind = jnp.minimum(jnp.arange(plan.drafts + 1), seen.drafts.count[:, None])
        fits = (behind == seen.at[:, None]) & np.asarray([bool(group) for group in plan.groups])
        return jnp.asarray(table)[fits.argmax(1)], fits.any(1)
