"""Slot plans: what one forward pass is fed, as constants.

A plan is P *pending* slots (real tokens that were emitted but have no keys and values yet, right-aligned) and a tree
of further slots rooted at the last pending one: drafts (guesses to be verified) and masks (questions). Everything here
is known at compile time; ids, cursors and the numbers of pending tokens and of drafts are data, and in a dynamic tree
also which draft hangs on which.

The *heads* are the root and the drafts: 0 is the root, i is draft i - 1. Each may have a *group* of masks behind it.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.decoding.options import MOST_SLOTS, positive

TOKEN, DRAFT, MASK = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """A static arrangement of S slots; hashable, so that it can be static under `jax.jit`.

    Attributes:
      name: what users call the strategy.
      pending: P, slots of the pending run; the last of them is the root.
      kinds: TOKEN, DRAFT or MASK for each of the S slots; the pending run first, then the drafts, then the masks.
      parents: slot each slot hangs on; -1 for the first. Parents come before their children.
      continues: the masks behind the last accepted slot give further tokens of this step, as far as τ allows; else
        they are asked for the drafts of the next step.
      dynamic: `parents` of drafts are an example only; `Drafts.parents` says.
      both_ways: the pending run and the masks are two blocks, and inside a block slots see each other both ways.
    """

    name: str
    pending: int
    kinds: tuple[int, ...]
    parents: tuple[int, ...]
    continues: bool = False
    dynamic: bool = False
    both_ways: bool = False

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.parents) or any(p >= i for i, p in enumerate(self.parents)):
            raise ValueError(f"plan {self.name}: every slot needs one parent that comes before it, got {self.parents}")
        if self.size > MOST_SLOTS:
            raise ValueError(
                f"{self.name} would feed {self.size} slots a forward pass; at most {MOST_SLOTS}: lower its sizes"
            )
        if self.dynamic and self.pending > 1:
            raise ValueError(f"plan {self.name}: a dynamic tree hangs on one pending token, got {self.pending}")
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
        """D, slots for drafts."""
        return self.kinds.count(DRAFT)

    @property
    def masks(self) -> int:
        return self.kinds.count(MASK)

    @property
    def heads(self) -> range:
        """Slots whose predictions decide which drafts are accepted: the root and the drafts."""
        return range(self.root, self.root + 1 + self.drafts)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The run of masks behind each head; empty where there is none."""
        behind = {parent: i for i, parent in enumerate(self.parents) if self.kinds[i] == MASK}

        def run(slot: int) -> Iterator[int]:
            while slot in behind:
                yield (slot := behind[slot])

        return tuple(tuple(run(head)) for head in self.heads)

    @property
    def asks(self) -> int:
        """Masks of a group; 0 if there are none."""
        return max(map(len, self.groups))

    @property
    def reach(self) -> int:
        """The most drafts a step can accept."""
        return int(self.depth[list(self.heads)].max())

    @property
    def judged(self) -> tuple[int, ...]:
        """Slots whose predictions every step needs: the heads, and masks that give tokens if none depend on drafts."""
        return (*self.heads, *(self.groups[0][: self.tail - 1] if self.continues and not self.drafts else ()))

    @property
    def head_rows(self) -> int:
        """Rows of logits a step computes: of the judged slots, and of the masks behind the last accepted draft."""
        return len(self.judged) + (self.asks if self.drafts else 0)

    @property
    def tail(self) -> int:
        """The most tokens a step can emit behind the accepted drafts."""
        # Inside a block the last mask is there to be seen; what it would predict lies behind the block.
        return 1 + (self.asks - self.both_ways if self.continues else 0)

    @property
    def window(self) -> int:
        """W, the most tokens a step can emit."""
        return self.reach + self.tail

    @property
    def commits(self) -> int:
        """Entries written to a row's cache by a step: the pending run and the longest path of drafts."""
        return self.pending + self.reach

    @property
    def is_chain(self) -> bool:
        """Whether no head has two drafts behind it: they are one run."""
        return not self.dynamic and self.reach == self.drafts

    def with_pending(self, pending: int) -> "SlotPlan":
        """The same tree behind a pending run of another length."""
        more = pending - self.pending
        tree = tuple(p + more for p in self.parents[self.pending :])
        kinds = (TOKEN,) * pending + self.kinds[self.pending :]
        return dataclasses.replace(self, pending=pending, kinds=kinds, parents=(*range(-1, pending - 1), *tree))

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """[S] int32, distance from the root; negative for the pending slots before it."""
        steps = self._ancestors.sum(1).astype(np.int32)
        return steps - steps[self.root]

    @functools.cached_property
    def sees(self) -> np.ndarray:
        """[S, S] bool, query slot × key slot: a slot sees its ancestors and itself; `both_ways` all of its block."""
        if not self.both_ways:
            return self._ancestors
        block = np.arange(self.size) // self.pending
        return block[:, None] >= block

    @functools.cached_property
    def _ancestors(self) -> np.ndarray:
        sees = np.eye(self.size, dtype=bool)
        for slot, parent in enumerate(self.parents):
            if parent >= 0:
                sees[slot] |= sees[parent]
        return sees

    @functools.cached_property
    def is_mask(self) -> np.ndarray:
        """[S] bool."""
        return np.asarray(self.kinds) == MASK

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """[M] int32, the place of each mask in its group."""
        return np.asarray([group.index(slot) for group in self.groups for slot in group], np.int32)

    @functools.cached_property
    def head_parents(self) -> np.ndarray:
        """[D] int32, the head each draft hangs on."""
        return np.asarray([self.parents[slot] - self.root for slot in self.heads[1:]], np.int32)

    def sees_with(self, head_parents: jax.Array) -> jax.Array:
        """[N, S, S] bool: `sees` of a dynamic tree whose drafts hang on the heads `head_parents` [N, D]."""
        rows, drafts = head_parents.shape
        itself = jnp.broadcast_to(jnp.eye(drafts + 1, dtype=bool), (rows, drafts + 1, drafts + 1))
        ancestors = itself
        for _ in range(self.reach):
            above = jnp.take_along_axis(ancestors, head_parents[..., None], axis=1)
            ancestors = ancestors.at[:, 1:].set(itself[:, 1:] | above)
        # A slot sees the drafts that the head it belongs to sees; all else does not depend on the tree's form.
        owner = np.zeros(self.size, np.int32)
        for head, slot in enumerate(self.heads):
            owner[[slot, *self.groups[head]]] = head
        behind = slice(self.root + 1, self.root + 1 + drafts)
        everything = jnp.broadcast_to(self.sees, (rows, self.size, self.size))
        return everything.at[:, :, behind].set(ancestors[:, owner, 1:])


def ar() -> SlotPlan:
    """One token a step."""
    return SlotPlan("ar", pending=1, kinds=(TOKEN,), parents=(-1,))


def mars(window: int) -> SlotPlan:
    """The sliding window of arXiv 2604.07023, section 4: W predictions a step from W - 1 masks; S = 2W - 1."""
    return speculative(0, window, name="mars")


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
    positive("k", k)
    return tree((1,) * k, name="comb")


def tree(widths: tuple[int, ...], *, masks: int | None = None, dynamic: bool = False, name: str = "tree") -> SlotPlan:
    """A tree of N = Σ widths drafts; k masks behind the root and every draft; S = (k + 1)(N + 1).

    `widths[i]` drafts at depth i + 1, all behind the first one of the depth before (arXiv 2603.17942). k is `masks`, or
    as many as the tree is deep. `dynamic`: any tree of N drafts up to len(widths) deep; the widths are an example.
    """
    k, parents = masks or len(widths), [-1]
    behind = 0
    for width in widths:
        first = len(parents)
        parents += [behind] * positive("the width of a tree", width)
        behind = first
    drafts = len(parents) - 1
    for head in range(drafts + 1):
        first = len(parents)
        parents += [head, *range(first, first + k - 1)]
    kinds = (TOKEN,) + (DRAFT,) * drafts + (MASK,) * (len(parents) - drafts - 1)
    return SlotPlan(name, pending=1, kinds=kinds, parents=tuple(parents), dynamic=dynamic)


def speculative(k: int, window: int = 1, *, name: str = "speculative") -> SlotPlan:
    """k drafts of another model in a row, W - 1 masks behind the root and every draft; S = W + k + (W - 1)(k + 1).

    The masks behind the last accepted draft go on by τ (arXiv 2604.07023, section 4.6).
    """
    positive("window", window)
    parents = list(range(-1, window + k - 1))
    for head in range(window - 1, window + k):
        first = len(parents)
        parents += [head, *range(first, first + window - 2)] if window > 1 else []
    kinds = (TOKEN,) * window + (DRAFT,) * k + (MASK,) * (len(parents) - window - k)
    return SlotPlan(name, pending=window, kinds=kinds, parents=tuple(parents), continues=True)


def drafted(k: int, name: str) -> SlotPlan:
    """k drafts in a row that come from elsewhere, and no masks; S = k + 1."""
    return dataclasses.replace(speculative(positive("k", k), name=name), continues=False)


def block(size: int) -> SlotPlan:
    """A block of the paper's cache, as it is fed when one of its tokens is known."""
    kinds = (TOKEN,) + (MASK,) * (positive("cache_block", size) - 1)
    return SlotPlan("block", pending=1, kinds=kinds, parents=tuple(range(-1, size - 1)), continues=True)


def block_diffusion(size: int) -> SlotPlan:
    """A block in which nothing is known yet, behind the one before it."""
    kinds = (TOKEN,) * positive("diffusion_block", size) + (MASK,) * size
    parents = tuple(range(-1, 2 * size - 1))
    return SlotPlan("block_diffusion", pending=size, kinds=kinds, parents=parents, continues=True, both_ways=True)
