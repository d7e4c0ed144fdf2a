"""How to decode, as users say it. Options that contradict each other are refused here, before anything is loaded."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tyro.conf import arg

MOST_SLOTS = 2048  # of a plan; more than any step should be fed
Name = Literal[
    "auto", "ar", "mars", "chain", "comb", "tree", "speculative", "lookup", "jacobi", "block", "block_diffusion"
]
Begin = Literal["mean", "last", "sample", "zero"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to decode; None takes a strategy's default. An option of another strategy is refused.

    Attributes:
      strategy: mars (several tokens a forward pass, by tau), ar (one), chain or comb (several, exactly those of ar
        while tau is 1), tree (the same with several guesses for each position), speculative (a draft model guesses),
        lookup (the text so far guesses), jacobi, block (mars with the paper's cache), block_diffusion (any order inside
        a block, for a model trained so), or auto: what the model was trained for, ar if it has no mask token.
      window: predictions a forward pass (mars, speculative); by default the block size of training (speculative: 1).
      k: drafts in a row (chain, comb, speculative, lookup, jacobi), depth of a tree; by default 4 (chain and comb: the
        block size of training, if there is one), 2 for a tree.
      block_complexity: slots a tree feeds, (k + 1)(1 + its drafts), at most; 30 by default.
      widths: drafts at each depth of a tree of fixed form; by default the form follows their probabilities.
      lookup: of a tree's drafts, up to so many go to what followed these words before.
      followers: weight, in a tree's candidates, of what followed the token before them in this text; 0.4 is good.
      bigrams: file of what the model expects behind each single token, for a tree's candidates too; if there is none
        it is made, by a forward pass of every token of the vocabulary.
      probe: ask a model that was never trained with masks (chain, comb, tree): what a mask is at first: the mean of
        the prompt, its last embeddings, a sample of the embedding table, or zero.
      probe_lambda: how far probing masks move to each new token; 0.1 by default.
      probe_velocity: memory of the probing masks' velocity, just below 1; by default they have none.
      sampler: guess with the sampler head of a model that has one, each token knowing the one before it (chain, comb,
        tree); by default yes.
      sampler_candidates: of each mask's own likeliest tokens the sampler head looks at so many, 64 by default; 0: at
        the whole vocabulary, which costs a product of the vocabulary's size for every mask.
      draft_window: predictions a forward pass of the draft model (speculative), if that is a MARS model; 1 by default.
      cache_block: positions of a block of the paper's cache (block); 32 by default.
      diffusion_block: positions of a block (block_diffusion); by default the block size of training.
    """

    strategy: Name = "auto"
    window: int | None = None
    k: int | None = None
    block_complexity: int | None = None
    widths: tuple[int, ...] | None = None
    lookup: int | None = None
    followers: float | None = None
    bigrams: Path | None = None
    probe: Begin | None = None
    probe_lambda: Annotated[float | None, arg(aliases=["--lambda"])] = None
    probe_velocity: float | None = None
    sampler: bool | None = None
    sampler_candidates: int | None = None
    draft_window: int | None = None
    cache_block: int | None = None
    diffusion_block: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """From keyword arguments; TypeError by name for those that are none."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(
                    f"{name} is no option of a strategy; there are {', '.join(known)}. What is asked of an answer, "
                    "such as tau, goes to generate"
                )
        return cls(**given)

    def __post_init__(self) -> None:
        name = self.strategy
        if name not in (known := get_args(Name)):
            raise ValueError(f"strategy must be one of {', '.join(known)}, got {name!r}")
        for option, owners in OWNERS.items():
            if getattr(self, option) is not None and name not in owners:
                if name == "auto" and option in FOR_AUTO:
                    continue
                raise ValueError(
                    f"{option} belongs to strategy {' or '.join(owners)}, not to {name}"
                    + ("; say k" if option == "window" and name in OWNERS["k"] else "")
                )
        if self.probe is not None and self.probe not in (starts := get_args(Begin)):
            raise ValueError(f"probe must be one of {', '.join(starts)}, got {self.probe!r}")
        if self.widths is not None:
            object.__setattr__(self, "widths", _widths(self.widths))  # a list from YAML or JSON is no static argument
        if self.widths is not None and (self.block_complexity or self.k or self.lookup):
            raise ValueError("widths fix a tree's form; block_complexity, k and lookup are for one that follows")
        if self.probe is None and (self.probe_lambda is not None or self.probe_velocity is not None):
            raise ValueError("probe_lambda and probe_velocity are of probing masks; say probe as well")
        for option in ("window", "k", "block_complexity", "lookup", "draft_window", "cache_block", "diffusion_block"):
            if getattr(self, option) is not None and positive(option, getattr(self, option)) > MOST_SLOTS:
                raise ValueError(f"{option} must be at most {MOST_SLOTS}, got {getattr(self, option)}")
        if not isinstance(self.sampler, bool | None):
            raise ValueError(f"sampler must be true or false, got {self.sampler!r}")
        if (count := self.sampler_candidates) is not None:
            if count != 0 or isinstance(count, bool):
                positive("sampler_candidates", count)
            if self.sampler is False:
                raise ValueError("sampler_candidates are of the sampler head, which sampler=False leaves out")
        _fraction("followers", self.followers)
        _fraction("probe_lambda", self.probe_lambda)
        _fraction("probe_velocity", self.probe_velocity)


OWNERS = {
    "window": ("mars", "speculative"),
    "k": ("chain", "comb", "tree", "speculative", "lookup", "jacobi"),
    "block_complexity": ("tree",),
    "widths": ("tree",),
    "lookup": ("tree",),
    "followers": ("tree",),
    "bigrams": ("tree",),
    "probe": ("chain", "comb", "tree"),
    "probe_lambda": ("chain", "comb", "tree"),
    "probe_velocity": ("chain", "comb", "tree"),
    "sampler": ("chain", "comb", "tree"),
    "sampler_candidates": ("chain", "comb", "tree"),
    "draft_window": ("speculative",),
    "cache_block": ("block",),
    "diffusion_block": ("block_diffusion",),
}


# What "auto" hands on to the strategy it takes.
FOR_AUTO = ("window", "k", "sampler", "sampler_candidates")


def positive(name: str, value: Any) -> int:
    """`value`, if it is a positive integer; ValueError if not."""
    if isinstance(value, bool) or not isinstance(value, int | numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def _widths(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"widths must be the drafts at each depth, such as (3, 2), got {value!r}")
    widths = tuple(positive("the width of a tree", width) for width in value)
    if sum(widths) > MOST_SLOTS:
        raise ValueError(f"widths must not add up to more than {MOST_SLOTS}, got {sum(widths)}")
    return widths


def _fraction(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, float | numbers.Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"{name} must be in 0..1, got {value!r}")
