"""Prompt lookup: what followed the last n tokens when they stood in the text before. The simplest drafts there are."""

import dataclasses

import jax
import jax.numpy as jnp

from marsjax.decoding.drafts import Drafts
from marsjax.decoding.proposers.base import Proposer

LONGEST = 3  # n-grams are tried from this length down to 1


@dataclasses.dataclass(frozen=True)
class Lookup(Proposer):
    k: int

    def propose(self, params, controls, state):
        tokens, count = find(state.tokens, state.length, self.k)
        return Drafts.of(tokens, count=count), ()


def find(tokens: jax.Array, length: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """What followed the latest earlier occurrence of the longest known n-gram: (tokens [N, k], how many of them [N]).

    Args:
      tokens: [N, T] int32. length: [N] int32, tokens known.
    """
    place = jnp.arange(tokens.shape[1])
    known = place < length[:, None] - 1  # the n-gram's last token; something must follow it
    ends_here = known
    best = jnp.full(length.shape, -1, jnp.int32)
    for n in range(LONGEST):
        last = jnp.take_along_axis(tokens, jnp.maximum(length[:, None] - 1 - n, 0), 1)
        earlier = jnp.pad(tokens, ((0, 0), (n, 0)))[:, : tokens.shape[1]]
        ends_here = ends_here & (earlier == last) & (place >= n) & (length[:, None] > n)
        found = jnp.where(ends_here, place, -1).max(1)
        best = jnp.where(found >= 0, found, best)  # a longer n-gram knows better
    following = best[:, None] + 1 + jnp.arange(k)
    count = jnp.where(best >= 0, jnp.minimum(length - 1 - best, k), 0).astype(jnp.int32)
    return jnp.take_along_axis(tokens, following, 1, mode="clip"), count
