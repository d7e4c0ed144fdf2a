"""Masks for a model that was never trained with any (arXiv 2603.17942): a vector that asks "and then?"."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from marsjax.decoding.options import Begin
from marsjax.decoding.proposers.base import Seen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProbeState:
    vector: jax.Array  # [N, k, D], the masks'
    velocity: jax.Array  # [N, D], mean step from one token's embedding to the next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProbeParams:
    rate: Any  # [] float32, λ: how far a mask moves to every committed token
    memory: Any  # [] float32, β of the velocity; 1 keeps it at zero
    mean: Any  # [D], of the embedding table; for "sample"
    deviation: Any  # [D]


@dataclasses.dataclass(frozen=True)
class Probe:
    """k mask vectors a lane.

    Attributes:
      begin: what they are at first: the mean of the prompt's embeddings, the last k of them, a draw from the normal
        distribution of the embedding table, or zero.
    """

    k: int
    hidden_size: int
    begin: Begin = "mean"

    def start(self, lanes: int) -> ProbeState:
        return ProbeState(jnp.zeros((lanes, self.k, self.hidden_size)), jnp.zeros((lanes, self.hidden_size)))

    def masks(self, mine: ProbeState) -> jax.Array:
        ahead = 1 + jnp.arange(self.k, dtype=jnp.float32)[:, None]
        return mine.vector + ahead * mine.velocity[:, None]

    def prefill(self, network, weights, probe: ProbeParams, state, mine: ProbeState) -> ProbeState:
        """First vectors of lanes whose prompt was committed just now."""
        new = state.forwards == 0
        if self.begin == "mean":
            # Token by token: the embeddings of all prompts at once would be larger than the cache.
            def add(at, total):
                return total + jnp.where((at < state.prompt)[:, None], network.embed(weights, state.tokens[:, at]), 0.0)

            longest = jnp.where(new, state.prompt, 0).max()
            total = jax.lax.fori_loop(0, longest, add, jnp.zeros_like(mine.velocity))
            vector = (total / state.prompt[:, None].astype(jnp.float32))[:, None]
        elif self.begin == "last":
            at = jnp.maximum(state.prompt[:, None] - self.k + jnp.arange(self.k), 0)
            vector = network.embed(weights, jnp.take_along_axis(state.tokens, at, 1))
        elif self.begin == "sample":
            shape = (self.k, self.hidden_size)

            def draw(length):  # by the prompt's length, so that it is the same in any lane
                return probe.mean + probe.deviation * jax.random.normal(jax.random.key(length), shape)

            vector = jax.vmap(draw)(state.prompt)
        else:
            vector = jnp.zeros_like(mine.vector)
        new = new[:, None]
        return ProbeState(
            jnp.where(new[..., None], jnp.broadcast_to(vector, mine.vector.shape), mine.vector),
            jnp.where(new, 0.0, mine.velocity),
        )

    def observe(self, network, weights, probe: ProbeParams, mine: ProbeState, seen: Seen) -> ProbeState:
        """m ← m + λ (e − m) and v ← β v + (1 − β)(e − e before) for every token the step emitted."""
        last = jnp.take_along_axis(seen.state.tokens, seen.state.length[:, None] - 1, 1)
        embedded = network.embed(weights, jnp.concatenate([last, seen.emitted], 1))
        vector, velocity = mine.vector, mine.velocity
        for i in range(seen.emitted.shape[1]):
            there = (i < seen.taken)[:, None]
            e, before = embedded[:, i + 1], embedded[:, i]
            moved = vector + probe.rate * (e[:, None] - vector)
            turned = probe.memory * velocity + (1 - probe.memory) * (e - before)
            vector = jnp.where(there[..., None], moved, vector)
            velocity = jnp.where(there, turned, velocity)
        return ProbeState(vector, velocity)
