"""The paper's own cache (arXiv 2604.07023, section 4), to reproduce its Table 5. Rows wait for the slowest.

The answer is cut into blocks of `size` positions. Every forward feeds a whole block, its tokens and masks where there
are none yet, behind the committed prefix; predictions are accepted by τ as in `mars`. When every row has filled its
block, one more forward commits it and leaves the logits that the next block begins with. `mars` keeps a cursor a row
instead, so that nobody waits and a step feeds 2 W - 1 slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from marsjax.decoding import acceptance, plans, sampling
from marsjax.decoding.cache import attend_cache_and_slots
from marsjax.decoding.proposers.base import Proposer
from marsjax.decoding.step import Controls, MaskSlots, Network, State, emit, sampling_of


@dataclasses.dataclass(frozen=True)
class Carry(Proposer):
    """State: logits [N, V] of the last committed token, which the block's first token is chosen by."""

    vocab: int

    def start(self, lanes, capacity):
        return jnp.zeros((lanes, self.vocab), jnp.float32)

    def prefill(self, network, chunk, params, state, max_chunks):
        """Commits the prompt's last token too."""
        new = (state.forwards == 0) & (state.cursor == state.prompt - 1)

        def commit(state):
            return self._committed(network, params, state, new)

        return jax.lax.cond(new.any(), commit, lambda state: state, state)

    def _committed(self, network, params, state, new):
        last = jnp.take_along_axis(state.tokens, state.prompt[:, None] - 1, 1)
        one = jnp.ones((last.shape[0], 1, 1), bool)
        attend = attend_cache_and_slots(state.cursor, one)
        hidden, slots = network.forward(params.target, last, state.prompt[:, None] - 1, attend, state.cache)
        logits = network.unembed(params.target, hidden)[:, 0]
        writes = new & (jnp.argmax(logits, -1) >= 0)  # out of the logits, as in `step`
        cache = network.commit(state.cache, slots, jnp.zeros_like(state.cursor), 1, state.cursor, writes)
        carry = jnp.where(new[:, None], logits, state.proposer)
        return dataclasses.replace(state, cache=cache, cursor=state.cursor + new, proposer=carry)


@dataclasses.dataclass(frozen=True)
class BlockCache:
    """A strategy like `marsjax.decoding.step.Strategy`, with a step of its own."""

    size: int
    proposer: Any
    name = "block"
    block_size = 1
    takes_tau = True

    @property
    def plan(self) -> plans.SlotPlan:
        return plans.block(self.size)

    @property
    def slack(self) -> int:
        return self.size

    def step(self, network: Network, params: Any, controls: Controls, state: State) -> State:
        """One forward of a block for every row: to fill it, or once all have, to commit it."""
        size, rows = self.size, state.length.shape[0]
        active = ~(state.done | controls.halted)
        filled = state.length - state.cursor
        commits = ((filled == size) | ~active).all()
        slot = jnp.arange(size)
        positions = state.cursor[:, None] + slot
        known = jnp.take_along_axis(state.tokens, positions, 1, mode="clip")
        tokens = jnp.where(slot < filled[:, None], known, controls.mask_id)
        sees = jnp.broadcast_to(slot[:, None] >= slot, (rows, size, size))
        attend = attend_cache_and_slots(state.cursor, sees)
        behind = slot - filled[:, None]
        masks = MaskSlots(jnp.maximum(behind, 0), open=behind >= 0)
        hidden, slots = network.forward(params.target, tokens, positions, attend, state.cache, masks)
        logits = jnp.where(controls.allowed, network.unembed(params.target, hidden), -jnp.inf)
        # Position i of the block is predicted by slot i - 1, the first one by what the last block left.
        first = jnp.where(controls.allowed, state.proposer, -jnp.inf)
        predicted = jnp.concatenate([first[:, None], logits[:, :-1]], 1)
        following = jnp.minimum(filled[:, None] + slot, size - 1)
        predicted = jnp.take_along_axis(predicted, following[..., None], 1)
        chosen = sampling.choose(predicted, state.length[:, None] + slot, **sampling_of(controls))
        sure = acceptance.confidence(predicted, chosen, controls.measure)
        count = acceptance.accept(sure, controls.tau, controls.measure)
        count = jnp.where(commits, 0, jnp.minimum(count, size - filled))
        after, _ = emit(network, controls, state, active, chosen, count)
        full = active & commits & (chosen[:, 0] >= 0)  # out of the logits, as in `step`: written once all have read
        return dataclasses.replace(
            after,
            cursor=state.cursor + jnp.where(full, size, 0),
            cache=network.commit(state.cache, slots, jnp.zeros_like(filled), size, state.cursor, full),
            proposer=jnp.where(full[:, None], logits[:, -1], state.proposer),
            steps=state.steps + 1,
            fed=state.fed + size,
        )
