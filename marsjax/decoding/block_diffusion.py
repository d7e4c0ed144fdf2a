"""Block diffusion decoding (arXiv 2503.09573; the baseline of arXiv 2604.07023): any order inside a block.

Blocks are those of training: `position // B`, prompt included. Every forward fills the masks of a row's block whose
confidence is at least τ, and the surest one always (τ = 1: that one alone). Tokens are returned as soon as all before
them are known. Logits are right-shifted, as `marsjax.training.block_diffusion` trains them: the slot before a mask
predicts it, and the block's first token comes from the last row of the block before.

A block's keys and values are those of its finished tokens, which see each other both ways. They need no forward of
their own: a full block is fed once more in front of the next one's first forward, and committed by it:

    committed       pending: the block before      the block
    0 … 4k-5        4k-4   4k-3   4k-2   4k-1      4k     4k+1   4k+2   4k+3
                    token  token  token  token     mask   mask   mask   mask
    predicts                               4k      4k+1   4k+2   4k+3

Rows are in the middle of different blocks; nobody waits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marsjax.decoding import acceptance, plans, sampling
from marsjax.decoding.cache import attend_cache_and_slots
from marsjax.decoding.proposers.base import Proposer
from marsjax.decoding.step import Controls, MaskSlots, Network, State, emit, sampling_of


class Block(NamedTuple):
    """What is known of the block at `length // B * B` beyond `length`."""

    tokens: jax.Array  # [N, B] int32
    known: jax.Array  # [N, B] bool
    # The block's first token as the row before it predicted it, in the one forward in which that row was fed.
    first: jax.Array  # [N] int32
    sure: jax.Array  # [N] float32


@dataclasses.dataclass(frozen=True)
class Filling(Proposer):
    """Proposes nothing; its state is a `Block`."""

    size: int

    def start(self, lanes, capacity):
        table = jnp.zeros((lanes, self.size), jnp.int32)
        return Block(table, table > 0, jnp.zeros(lanes, jnp.int32), jnp.zeros(lanes, jnp.float32))

    def admit(self, mine, new):
        return mine._replace(known=mine.known & ~new[:, None])


@dataclasses.dataclass(frozen=True)
class BlockDiffusion:
    """A strategy like `marsjax.decoding.step.Strategy`, with a step of its own. `block_size`: B."""

    block_size: int
    name = "block_diffusion"
    takes_tau = True

    @property
    def proposer(self) -> Filling:
        return Filling(self.block_size)

    @property
    def plan(self) -> plans.SlotPlan:
        return plans.block_diffusion(self.block_size)

    @property
    def slack(self) -> int:
        return self.block_size

    def step(self, network: Network, params: Any, controls: Controls, state: State) -> State:
        """One forward of a block for every row, with the full one before it where that is new."""
        size, mine = self.block_size, state.proposer
        active = ~(state.done | controls.halted)
        begin, slot = state.length // size * size, jnp.arange(size)
        pending = state.cursor < begin
        given = slot < (state.length - begin)[:, None]
        table = jnp.take_along_axis(state.tokens, begin[:, None] + slot, 1, mode="clip")
        held, known = jnp.where(given, table, mine.tokens), given | mine.known
        block = jnp.where(known, held, controls.mask_id)
        # Of each mask, those between it and the known token before it.
        ranks = slot - 1 - jax.lax.cummax(jnp.where(known, slot, -1), axis=1)
        masks = MaskSlots(jnp.maximum(ranks, 0), open=~known)
        hidden, slots, fed = self._forward(network, params.target, state, begin, pending, active, block, masks)

        logits = network.unembed(params.target, hidden[:, size - 1 : -1])
        logits = jnp.where(controls.allowed, logits, -jnp.inf)
        chosen = sampling.choose(logits, begin[:, None] + slot, **sampling_of(controls))
        sure = acceptance.confidence(logits, chosen, controls.measure)
        kept = (slot == 0) & ~pending[:, None]
        chosen, sure = jnp.where(kept, mine.first[:, None], chosen), jnp.where(kept, mine.sure[:, None], sure)

        fills = acceptance.fills(sure, ~known, controls.tau, controls.measure)
        held, known = jnp.where(fills, chosen, held), known | fills
        # What is known without a gap is returned.
        count = jnp.cumprod(known.astype(jnp.int32), 1).sum(1) - (state.length - begin)
        following = jnp.minimum((state.length - begin)[:, None] + slot, size - 1)
        after, _ = emit(network, controls, state, active, jnp.take_along_axis(held, following, 1), count)

        full = after.length == begin + size
        writes = active & pending & (chosen[:, 0] >= 0)  # out of the logits, as in `step`: written once all have read
        return dataclasses.replace(
            after,
            cursor=state.cursor + jnp.where(writes, size, 0),
            cache=network.commit(state.cache, slots, jnp.zeros_like(begin), size, state.cursor, writes),
            proposer=Block(held, known & ~full[:, None], chosen[:, 0], sure[:, 0]),
            steps=state.steps + 1,
            fed=state.fed + fed,
        )

    def _forward(self, network: Network, params: Any, state: State, begin, pending, active, block, masks):
        """(hidden rows [N, 2B, ...], keys and values) of both blocks, and how many slots were really fed.

        With `network.short_steps` the earlier block is left out where no row has one pending.
        """
        size, sees = self.block_size, jnp.asarray(self.plan.sees)

        def run(before: int):
            """With `before` slots, B or none, in front of the block."""
            at = jnp.arange(-before, size)
            positions = jnp.maximum(begin[:, None] + at, 0)
            earlier = jnp.take_along_axis(state.tokens, positions[:, :before], 1, mode="clip")
            present = (at >= 0) | pending[:, None]
            attend = attend_cache_and_slots(state.cursor, sees[size - before :, size - before :] & present[:, None])
            tokens = jnp.concatenate([earlier, block], 1)
            hidden, slots = network.forward(params, tokens, positions, attend, state.cache, masks)
            hidden, slots = (
                _padded(hidden, size - before, 1),
                jax.tree.map(lambda x: _padded(x, size - before, 2), slots),
            )
            return hidden, slots, jnp.int32(before + size)

        if not network.short_steps:
            return run(size)
        return jax.lax.cond((pending & active).any(), lambda: run(size), lambda: run(0))


def _padded(x: jax.Array, before: int, axis: int) -> jax.Array:
    return jnp.pad(x, [(before if i == axis else 0, 0) for i in range(x.ndim)])
