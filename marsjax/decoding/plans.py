"""Slot plans: what one forward pass is fed, as constants.

A plan is P *pending* slots (real tokens that were emitted but have no keys and values yet, right-aligned) and a tree
of further slots rooted at the last pending one. Everything here is known at compile time; ids, the number of pending
tokens and the cursors are data.
"""

import dataclasses
import functools

import numpy as np

TOKEN, MASK = 0, 1


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """A static arrangement of S slots; hashable, so that it can be static under `jax.jit`.

    Attributes:
      name: what users call the strategy.
      pending: P, slots of the pending run; the last of them is the root.
      kinds: TOKEN or MASK for each of the S slots.
      parents: slot each slot hangs on; -1 for the first. Parents come before their children.
      heads: slots whose predictions are needed, in the order of the positions they predict. The first is the root.
    """

    name: str
    pending: int
    kinds: tuple[int, ...]
    parents: tuple[int, ...]
    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.parents) or any(p >= i for i, p in enumerate(self.parents)):
            raise ValueError(f"plan {self.name}: every slot needs one parent that comes before it, got {self.parents}")
        if self.heads[0] != self.root:
            raise ValueError(
                f"plan {self.name}: the first prediction must be the root's ({self.root}), got {self.heads}"
            )

    @property
    def size(self) -> int:
        """S, slots forwarded a row and step."""
        return len(self.kinds)

    @property
    def root(self) -> int:
        return self.pending - 1

    @property
    def window(self) -> int:
        """W, the most tokens a step can emit; also the most that can be pending in the next."""
        return len(self.heads)

    def with_pending(self, pending: int) -> "SlotPlan":
        """The same tree behind a shorter pending run."""
        cut = self.pending - pending
        return dataclasses.replace(
            self,
            pending=pending,
            kinds=self.kinds[cut:],
            parents=tuple(max(p - cut, -1) for p in self.parents[cut:]),
            heads=tuple(h - cut for h in self.heads),
        )

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """[S] int32, distance from the root; negative for the pending slots before it."""
        steps = np.zeros(self.size, np.int32)
        for slot, parent in enumerate(self.parents):
            steps[slot] = 0 if parent < 0 else steps[parent] + 1
        return steps - steps[self.root]

    @functools.cached_property
    def sees(self) -> np.ndarray:
        """[S, S] bool, query slot × key slot: a slot sees its ancestors and itself."""
        sees = np.eye(self.size, dtype=bool)
        for slot, parent in enumerate(self.parents):
            if parent >= 0:
                sees[slot] |= sees[parent]
        return sees

    @functools.cached_property
    def is_mask(self) -> np.ndarray:
        """[S] bool."""
        return np.asarray(self.kinds) == MASK


def _chain(name: str, pending: int, masks: int) -> SlotPlan:
    size = pending + masks
    return SlotPlan(
        name=name,
        pending=pending,
        kinds=(TOKEN,) * pending + (MASK,) * masks,
        parents=tuple(range(-1, size - 1)),
        heads=tuple(range(pending - 1, size)),
    )


def ar() -> SlotPlan:
    """One token a step."""
    return _chain("ar", pending=1, masks=0)


def mars(window: int) -> SlotPlan:
    """The sliding window of arXiv 2604.07023, section 4: W predictions a step from W - 1 masks; S = 2W - 1."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be a positive integer, got {window!r}")
    return _chain("mars", pending=window, masks=window - 1)
