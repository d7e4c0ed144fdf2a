"""Slot plans: what one forward pass is fed, as constants.

A plan is P *pending* slots (real tokens that were emitted but have no keys and values yet, right-aligned) and a tree
of further slots rooted at the last pending one: drafts (guesses to be verified) and masks (questions). Everything here
is known at compile time; ids, cursors and the numbers of pending tokens and of drafts are data.
"""

import dataclasses
import functools

import numpy as np

TOKEN, DRAFT, MASK = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """A static arrangement of S slots; hashable, so that it can be static under `jax.jit`.

    Attributes:
      name: what users call the strategy.
      pending: P, slots of the pending run; the last of them is the root.
      kinds: TOKEN, DRAFT or MASK for each of the S slots; the pending run first, then the drafts.
      parents: slot each slot hangs on; -1 for the first. Parents come before their children.
    """

    name: str
    pending: int
    kinds: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.parents) or any(p >= i for i, p in enumerate(self.parents)):
            raise ValueError(f"plan {self.name}: every slot needs one parent that comes before it, got {self.parents}")
        expected = (TOKEN,) * self.pending + (DRAFT,) * self.drafts
        if self.pending < 1 or self.kinds[: len(expected)] != expected:
            raise ValueError(f"plan {self.name}: pending tokens come first, then drafts, then masks, got {self.kinds}")

    @property
    def size(self) -> int:
        """S, slots forwarded a row and step."""
        return len(self.kinds)

    @property
    def root(self) -> int:
        return self.pending - 1

    @property
    def drafts(self) -> int:
        """k, slots for drafts."""
        return self.kinds.count(DRAFT)

    @functools.cached_property
    def heads(self) -> tuple[int, ...]:
        """Slots whose predictions decide what is accepted: the root and its drafts, or if there are none its masks."""
        after = DRAFT if self.drafts else MASK
        return (self.root, *(i for i, kind in enumerate(self.kinds) if kind == after))

    @property
    def window(self) -> int:
        """W, the most tokens a step can emit."""
        return len(self.heads)

    @property
    def commits(self) -> int:
        """Entries written to a row's cache by a step: the pending run and the drafts."""
        return self.pending + self.drafts

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """With drafts: the run of masks behind each of `heads`; empty where there is none."""
        behind = {parent: i for i, parent in enumerate(self.parents) if self.kinds[i] == MASK}

        def run(slot: int) -> tuple[int, ...]:
            return (behind[slot], *run(behind[slot])) if slot in behind else ()

        return tuple(run(head) for head in self.heads) if self.drafts else ()

    def with_pending(self, pending: int) -> "SlotPlan":
        """The same tree behind a shorter pending run."""
        cut = self.pending - pending
        return dataclasses.replace(
            self, pending=pending, kinds=self.kinds[cut:], parents=tuple(max(p - cut, -1) for p in self.parents[cut:])
        )

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """[S] int32, distance from the root; negative for the pending slots before it."""
        steps = self.sees.sum(1).astype(np.int32)
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


def ar() -> SlotPlan:
    """One token a step."""
    return SlotPlan("ar", pending=1, kinds=(TOKEN,), parents=(-1,))


def mars(window: int) -> SlotPlan:
    """The sliding window of arXiv 2604.07023, section 4: W predictions a step from W - 1 masks; S = 2W - 1."""
    size = 2 * positive("window", window) - 1
    return SlotPlan(
        "mars",
        pending=window,
        kinds=(TOKEN,) * window + (MASK,) * (window - 1),
        parents=tuple(range(-1, size - 1)),
    )


def chain(k: int) -> SlotPlan:
    """Linear self-verification: k drafts in a row, k masks behind them; S = 2k + 1.

    The masks propose only if every draft was accepted: else they saw wrong tokens, and the next step has no drafts.
    """
    size = 2 * positive("k", k) + 1
    return SlotPlan("chain", pending=1, kinds=(TOKEN,) + (DRAFT,) * k + (MASK,) * k, parents=tuple(range(-1, size - 1)))


def comb(k: int) -> SlotPlan:
    """Quadratic self-verification: k drafts in a row, k masks behind the root and behind every draft; S = (k + 1)².

    Whatever is accepted, k masks stand behind it: every step has k drafts.
    """
    parents = list(range(-1, positive("k", k)))
    for head in range(k + 1):
        first = len(parents)
        parents += [head, *range(first, first + k - 1)]
    return SlotPlan("comb", pending=1, kinds=(TOKEN,) + (DRAFT,) * k + (MASK,) * (k * (k + 1)), parents=tuple(parents))


DEFAULT_WINDOW = DEFAULT_K = 4


def named(strategy: str, *, window: int | None = None, k: int | None = None) -> SlotPlan:
    """The plan users call `strategy`: "ar", "mars" (with `window`), "chain" or "comb" (with `k`)."""
    if strategy not in ("ar", "mars", "chain", "comb"):
        raise ValueError(f"strategy must be one of ar, mars, chain, comb, got {strategy!r}")
    verifies = strategy in ("chain", "comb")
    if window is not None and strategy != "mars":
        raise ValueError(f"window belongs to strategy mars, not to {strategy}" + "; say k" * verifies)
    if k is not None and not verifies:
        raise ValueError(f"k belongs to strategies chain and comb, not to {strategy}")
    if strategy == "ar":
        return ar()
    if strategy == "mars":
        return mars(DEFAULT_WINDOW if window is None else window)
    return (chain if strategy == "chain" else comb)(DEFAULT_K if k is None else k)


def positive(name: str, value: int) -> int:
    """`value`, if it is a positive integer; ValueError if not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
