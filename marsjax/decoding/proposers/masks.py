"""Self-speculation: the masks behind the last accepted slot propose what the next step verifies."""

import dataclasses
from collections.abc import Callable
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
from marsjax.decoding.proposers.sampler import Sampler
from marsjax.decoding.step import sampling_of

Behind = Callable[[int, jax.Array], jax.Array]  # (i, the token before [N]) → logits [N, V] of mask i


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
      sampler: what a mask predicts once the token before is chosen; None: what it predicts alone.
    """

    plan: SlotPlan
    tree: trees.Static | trees.Dynamic | None = None
    probe: Probe | None = None
    sampler: Sampler | None = None

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
        hidden = jnp.take_along_axis(seen.hidden, index, axis=1)
        positions = seen.length[:, None] + jnp.arange(rows.shape[1])
        # Coupled rows guess with the noise of the position, which the model's own choice will meet again. Rejection is
        # exact for a draft that is certain to be proposed: the likeliest token.
        how = sampling_of(controls) | {"temperature": jnp.where(controls.rejection, 0.0, controls.temperature)}
        last = jnp.take_along_axis(seen.emitted, jnp.maximum(seen.taken - 1, 0)[:, None], 1)[:, 0]
        behind = self.sampler.behind(network, params.target, seen, hidden) if self.sampler is not None else None
        if self.tree is not None:
            ask = _asking(seen, hidden, behind, positions, how)
            made = self.tree.of(seen, controls, ask, last, params.proposer.prior)
        else:
            if behind is None:
                logits = seen.logits_of(hidden)
                tokens = sampling.choose(logits, positions, **how)
            else:
                logits, tokens = _in_turn(behind, last, positions, how)
            made = Drafts.of(tokens, confidence=acceptance.confidence(logits, tokens, controls.measure))
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


def _in_turn(behind: Behind, last: jax.Array, positions: jax.Array, how: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """(logits [N, k, V], tokens [N, k]) of masks that predict one after the other, the first behind `last` [N]."""
    logits, tokens = [], [last]
    for i in range(positions.shape[1]):
        logits.append(behind(i, tokens[-1]))
        tokens.append(sampling.choose(logits[-1][:, None], positions[:, i : i + 1], **how)[:, 0])
    return jnp.stack(logits, 1), jnp.stack(tokens[1:], 1)


def _asking(
    seen: Seen, hidden: jax.Array, behind: Behind | None, positions: jax.Array, how: dict[str, Any]
) -> trees.Ask:
    """What a tree asks masks with `hidden` rows [N, k, ...]."""
    if behind is None:
        logits = seen.logits_of(hidden)
        noisy = sampling.perturbed(logits, positions, **how)
        return lambda i, before: (logits[:, i], noisy[:, i])

    def ask(i, before):
        logits = behind(i, before)
        return logits, sampling.perturbed(logits[:, None], positions[:, i : i + 1], **how)[:, 0]

    return ask
