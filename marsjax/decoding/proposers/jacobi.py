"""Jacobi decoding (arXiv 2604.07023, appendix C): future slots hold the last iterate, until it is a fixed point."""

import dataclasses

import jax
import jax.numpy as jnp

from marsjax.decoding import sampling
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.proposers.base import Proposer, Seen


@dataclasses.dataclass(frozen=True)
class Jacobi(Proposer):
    """State: the iterate [N, k] int32 for the positions behind the last token."""

    k: int

    def start(self, lanes, capacity):
        return jnp.zeros((lanes, self.k), jnp.int32)

    def prefill(self, network, chunk, params, state, max_chunks):
        """The first iterate is the last token, k times over."""
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
        first = jnp.where((state.forwards == 0)[:, None], last, state.proposer)
        return dataclasses.replace(state, proposer=first)

    def propose(self, params, controls, state):
        return Drafts.of(state.proposer), state.proposer

    def observe(self, network, params, controls, mine, seen: Seen):
        """The model's own choices, from the one behind the token emitted last; the final one fills up."""

        def likeliest():
            # Where rejection decides, `own` was drawn with the noise that would also replace it: no sample of p then.
            best = sampling.greedy(seen.logits_of(seen.hidden[:, : self.k + 1]))
            return jnp.where(controls.rejection[:, None], best, seen.own)

        own = jax.lax.cond(controls.rejection.any(), likeliest, lambda: seen.own)
        rows = jnp.minimum(seen.accepted[:, None] + 1 + jnp.arange(self.k), self.k)
        return jnp.take_along_axis(own, rows, 1)
