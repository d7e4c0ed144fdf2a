"""What proposes drafts: the part of a strategy that a slot plan leaves open."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from marsjax.decoding import drafts
from marsjax.decoding.drafts import Drafts

if TYPE_CHECKING:
    from marsjax.decoding.step import Controls, Network, State


class Seen(NamedTuple):
    """What a step computed, for the proposer to learn from. H = 1 + D heads: the root and the draft slots."""

    state: "State"  # before the step
    drafts: Drafts  # that it verified
    own: jax.Array  # [N, H] int32, the model's own token behind each head
    at: jax.Array  # [N] int32, the head that was accepted last
    accepted: jax.Array  # [N] int32, drafts accepted
    emitted: jax.Array  # [N, W] int32
    taken: jax.Array  # [N] int32, how many of them; 0 in rows that have ended
    length: jax.Array  # [N] int32, tokens known after the step
    hidden: jax.Array  # [N, S, ...], of all slots
    logits_of: Callable[[jax.Array], jax.Array]  # hidden rows [N, k, ...] → logits [N, k, V], forbidden ids at -inf


class Proposer:
    """Proposes nothing. Proposers are frozen dataclasses, static under `jax.jit`; what they learn is a pytree.

    `params` is what the strategy was built with for its proposer: arrays, data under jit. Every array of a proposer's
    state has the N lanes in front.
    """

    @property
    def draft_forwards(self) -> int:
        """Of a model of its own, for each of the target's."""
        return 0

    @property
    def slack(self) -> int:
        """Entries beyond a row's limit that it writes to the token table or a cache of its own."""
        return 0

    def start(self, lanes: int, capacity: int) -> Any:
        """The state of N lanes of T tokens that have all ended."""
        return ()

    def admit(self, mine: Any, new: jax.Array) -> Any:
        """Forget what the lanes `new` [N] bool knew."""
        return mine

    def prefill(self, network: "Network", chunk: int, params: Any, state: "State", max_chunks: jax.Array) -> "State":
        """Called after the prompts are committed; must do nothing to lanes in the middle of an answer.

        `params` are all: those of the target and of the proposer.
        """
        return state

    def propose(self, params: Any, controls: "Controls", state: "State") -> tuple[Drafts, Any]:
        """Before a step: (drafts for it to verify, new state). `params` are all."""
        return drafts.none(state.length.shape[0]), state.proposer

    def masks(self, mine: Any) -> jax.Array | None:
        """[N, k, D] embeddings for the masks of each group, in their order; None: that of the mask token."""
        return None

    def observe(self, network: "Network", params: Any, controls: "Controls", mine: Any, seen: Seen) -> Any:
        """After a step: the new state. `params` are all."""
        return mine

    def resize(self, mine: Any, resized: Callable[[jax.Array, int], jax.Array]) -> Any:
        """The state with T changed; `resized(array, axis)` does that to an array."""
        return mine
