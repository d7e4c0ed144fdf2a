"""Drafts that know each other: the sampler head, one mask after the other (arXiv 2507.11851)."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from marsjax.decoding import sampling
from marsjax.decoding.proposers.base import Seen

if TYPE_CHECKING:
    from marsjax.decoding.step import Network

DEFAULT_CANDIDATES = 64


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What a mask predicts once the token before is chosen.

    The head reads a whole vocabulary for a single row, once for every mask. So it is asked about the likeliest tokens
    of the mask's own prediction only, whose logits come for all masks at once; it shares the probability that these
    have together out among them.

    Attributes:
      candidates: C, how many those are; None: the whole vocabulary, and the mask's own prediction does not matter.
    """

    candidates: int | None = DEFAULT_CANDIDATES

    def behind(
        self, network: "Network", weights: Any, seen: Seen, hidden: jax.Array
    ) -> Callable[[int, jax.Array], jax.Array]:
        """(i, the token before [N]) → logits [N, V] of mask i, of masks with hidden rows [N, k, D]."""

        def sampled(i, before):
            return network.sample(weights, before, hidden[:, i])

        if self.candidates is None:
            return lambda i, before: seen.logits_of(sampled(i, before)[:, None])[:, 0]

        own = jax.nn.log_softmax(seen.logits_of(hidden), axis=-1)
        best, ids = sampling.top(own, self.candidates)
        together = jax.nn.logsumexp(best, axis=-1, keepdims=True)
        rows = jnp.arange(own.shape[0])[:, None]

        def among(i, before):
            logits = network.unembed_some(weights, sampled(i, before), ids[:, i])
            logits = jnp.where(jnp.isneginf(best[:, i]), -jnp.inf, logits)  # may not be emitted
            shared = jax.nn.log_softmax(logits, axis=-1) + together[:, i]
            return own[:, i].at[rows, ids[:, i]].set(shared)

        return among
