"""What is refused before anything runs, with the reason; and what a strategy's state must be for one compilation."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from decoding_helpers import MASK, generator, pretrained
from flax import nnx
from strategies_helpers import DRAFT, STRATEGIES, base, check_types, marked, of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marsjax.decoding import Generator
from marsjax.decoding.options import Options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "beam"}, "strategy must be one of auto, ar, .*got 'beam'"),
        ({"strategy": "tree", "window": 3}, "window belongs to strategy mars or speculative, not to tree; say k"),
        ({"strategy": "comb", "block_complexity": 30}, "block_complexity belongs to strategy tree, not to comb"),
        ({"strategy": "comb", "widths": (3, 2)}, "widths belongs to strategy tree"),
        ({"strategy": "chain", "lookup": 2}, "lookup belongs to strategy tree"),
        ({"strategy": "tree", "draft_window": 2}, "draft_window belongs to strategy speculative"),
        ({"strategy": "mars", "cache_block": 8}, "cache_block belongs to strategy block"),
        ({"strategy": "block", "k": 8}, "k belongs to strategy .*not to block"),
        ({"strategy": "block", "window": 8}, "window belongs to .*not to block$"),
        ({"strategy": "tree", "widths": (3, 2), "k": 2}, "widths fix a tree's form"),
        ({"strategy": "tree", "widths": (3, 2), "block_complexity": 30}, "widths fix a tree's form"),
        ({"strategy": "tree", "widths": (3, 2), "lookup": 2}, "widths fix a tree's form"),
        ({"strategy": "tree", "widths": ()}, "widths must be the drafts at each depth"),
        ({"strategy": "tree", "widths": "32"}, "widths must be the drafts at each depth"),
        ({"strategy": "tree", "widths": (3, 0)}, "width of a tree must be a positive integer, got 0"),
        ({"strategy": "tree", "widths": (3, 1.5)}, "width of a tree must be a positive integer, got 1.5"),
        ({"strategy": "tree", "probe_lambda": 0.1}, "say probe as well"),
        ({"strategy": "comb", "probe_velocity": 0.9}, "say probe as well"),
        ({"strategy": "tree", "probe": "median"}, "probe must be one of mean, last, sample, zero, got 'median'"),
        ({"strategy": "tree", "probe": "mean", "probe_lambda": 1.5}, "probe_lambda must be in 0..1, got 1.5"),
        ({"strategy": "tree", "probe": "mean", "probe_lambda": True}, "probe_lambda must be in 0..1, got True"),
        ({"strategy": "tree", "probe": "mean", "probe_lambda": "x"}, "probe_lambda must be in 0..1, got 'x'"),
        ({"strategy": "tree", "probe": "mean", "probe_velocity": float("nan")}, "probe_velocity must be in 0..1"),
        *(({"strategy": name, "probe": "mean"}, "probe belongs to strategy chain or comb or tree, not to")
          for name in ("ar", "mars", "speculative", "lookup", "jacobi", "block")),
        *(({"strategy": "lookup", "k": k}, "k must be a positive integer") for k in (0, -1, 2.0, True)),
        ({"strategy": "block", "cache_block": 0}, "cache_block must be a positive integer"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(options, reason):
    with pytest.raises(ValueError, match=reason):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k": 3, "block_complexity": 15}, "block_complexity 15 leaves 2 drafts for a tree 3 deep; .*at least 16"),
        ({"k": 2, "block_complexity": 1}, "leaves 0 drafts for a tree 2 deep; it must be at least 9"),
        ({"k": 2, "block_complexity": 18, "lookup": 6}, "lookup=6 is more than the tree's 5 drafts"),
        ({"k": 1, "block_complexity": 146}, "tree of 72 drafts at one depth needs more than the 72 tokens.*complexity"),
        ({"widths": (72,)}, "tree of 72 drafts at one depth needs more than the 72 tokens .*lower widths"),
        ({"k": 2, "block_complexity": 3000}, "at most 2048"),
        ({"widths": (600, 100)}, "at most 2048"),
    ],
)
def test_trees_that_cannot_be(options, reason):
    with pytest.raises(ValueError, match=reason):
        base("tiny_mars").with_strategy(strategy="tree", **options)


@pytest.mark.parametrize("strategy", ["lookup", "jacobi", "chain", "speculative"])
def test_k_beyond_the_slots_of_a_forward(strategy):
    draft = {"draft": marked("tiny_random")} if strategy == "speculative" else {}
    with pytest.raises(ValueError, match="k must be at most 2048, got 3000"):
        base("tiny_mars").with_strategy(strategy=strategy, k=3000, **draft)


def test_the_least_and_the_largest_tree():
    assert base("tiny_mars").with_strategy(strategy="tree", k=3, block_complexity=16).plan.drafts == 3
    assert base("tiny_mars").with_strategy(strategy="tree", k=1, block_complexity=145).plan.drafts == 71
    assert base("tiny_mars").with_strategy(strategy="tree", widths=[3, 2]).plan == of("static").plan  # as YAML has it


@pytest.mark.parametrize(
    "strategy", ["auto", "ar", "mars", "chain", "comb", "tree", "lookup", "jacobi", "block", "block_diffusion"]
)
def test_a_draft_model_belongs_to_speculative(strategy):
    with pytest.raises(ValueError, match="a draft model is for strategy 'speculative', not for"):
        base("tiny_mars").with_strategy(strategy=strategy, draft=marked("tiny_random"))


def test_speculative_needs_a_draft_model():
    with pytest.raises(ValueError, match="strategy 'speculative' needs a draft model: give draft"):
        base("tiny_mars").with_strategy(**DRAFT)


def test_masks_need_a_token_or_a_probe():
    plain = generator("tiny_random", "ar", lanes=1)
    plain._target = dataclasses.replace(plain._target, mask_id=None)
    with pytest.raises(ValueError, match=r"'tree' needs a mask token and this model has none: .*\(probe\)"):
        plain.with_strategy(strategy="tree")
    with pytest.raises(ValueError, match=r"'block' needs a mask token .* or use 'ar'"):
        plain.with_strategy(strategy="block")
    with pytest.raises(ValueError, match="'speculative' needs a mask token"):
        plain.with_strategy(**DRAFT, window=2, draft=marked("tiny_mars"))
    for options in ({"strategy": "tree", "probe": "zero"}, {"strategy": "lookup"}, {"strategy": "jacobi"}):
        plain.with_strategy(**options)
    plain.with_strategy(**DRAFT, draft=pretrained("tiny_mars"))
    plain._target = dataclasses.replace(plain._target, mask_id=MASK)


def test_draft_masks_need_a_mask_token():
    with pytest.raises(ValueError, match="draft_window=2 needs a draft model with a mask token"):
        base("tiny_mars").with_strategy(**DRAFT, draft_window=2, draft=pretrained("tiny_random"))


def test_a_draft_model_that_is_damaged():
    loaded = marked("tiny_random")
    model = nnx.clone(loaded.model)
    scale = model.final_norm.scale
    scale[...] = scale[...].at[3].set(np.nan)
    with pytest.raises(ValueError, match=r"draft model's weight final_norm\.scale is not finite"):
        base("tiny_mars").with_strategy(**DRAFT, draft=dataclasses.replace(loaded, model=model))


def words(*more, mask=True):
    vocabulary = {w: i for i, w in enumerate([*(f"w{i}" for i in range(60)), *more])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if mask:
        backend.add_special_tokens(["<|mask|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_tokenizers(target, draft):
    target, draft = (
        dataclasses.replace(marked(name), tokenizer=t) for name, t in (("tiny_mars", target), ("tiny_random", draft))
    )
    return Generator(target, lanes=8, draft=draft, **DRAFT)


def test_vocabularies_must_be_the_same():
    with pytest.raises(
        ValueError, match=r"1 differ, such as id 60: 'right' .* 'left' in the target; .*target's family"
    ):
        with_tokenizers(words("left"), words("right"))
    with pytest.raises(ValueError, match=r"another vocabulary \(60 tokens\) than the target \(71\)"):
        with_tokenizers(words(*(f"x{i}" for i in range(11)), mask=False), words(mask=False))
    with_tokenizers(words("left"), words("left"))
    with_tokenizers(words("left"), words("left", "<|mask|>", mask=False))
    with_tokenizers(words("left", mask=False), words("left"))  # a mask that only one of them has is no harm
    with pytest.raises(ValueError, match="has 704 rows and the target's 72, and there are not two tokenizers"):
        base("tiny_mars").with_strategy(**DRAFT, draft=pretrained("demo_mars"))


@pytest.mark.parametrize("name", ["lookup", "jacobi", "draft"])
def test_tau_has_no_meaning_without_masks(name):
    with pytest.raises(ValueError, match=r"tau=0\.9 has no meaning with strategy"):
        of(name).spec([5], tau=0.9)
    of(name).spec([5], tau=1.0)


@pytest.mark.parametrize("name", ["static", "dynamic-lookup-mean", "draft-masks", "block"])
def test_tau_has_a_meaning_with_masks(name):
    assert of(name).spec([5], tau=0.5).tau == np.float32(0.5)


def test_rejection_needs_drafts():
    for generator_ in (base("tiny_mars"), of("block")):
        with pytest.raises(ValueError, match="verification='rejection' belongs to strategies that verify drafts"):
            generator_.spec([5], verification="rejection")
    for name in set(STRATEGIES) - {"block"}:
        assert of(name).spec([5], verification="rejection").rejection


def test_positions_are_those_that_both_models_have():
    loaded = marked("tiny_random")
    model = nnx.clone(loaded.model)
    model.config = dataclasses.replace(model.config, max_positions=100)
    short = base("tiny_mars").with_strategy(**DRAFT, draft=dataclasses.replace(loaded, model=model))
    short.spec([5] * 60, max_new_tokens=40)
    with pytest.raises(ValueError, match="that makes 101, but the shorter of target and draft model has 100 positions"):
        short.spec([5] * 60, max_new_tokens=41)
    of("draft").spec([5] * 472, max_new_tokens=40)
    with pytest.raises(ValueError, match="512 positions"):
        of("draft").spec([5] * 472, max_new_tokens=41)


ALL = STRATEGIES | {
    f"{strategy}-{begin}": {"strategy": strategy, "probe": begin}
    for strategy in ("tree", "chain", "comb")
    for begin in ("mean", "last", "sample", "zero")
}


@pytest.mark.parametrize("name", ALL)
def test_a_step_leaves_the_types_it_found(name):
    """Another dtype, or a weak one, and every program would be compiled a second time in the middle of a request."""
    draft = {"draft": marked("tiny_random")} if ALL[name]["strategy"] == "speculative" else {}
    check_types(base("tiny_mars").with_strategy(**ALL[name], **draft).runtime)


def test_load_hands_every_option_on():
    """Also those that belong to a strategy alone, which are checked before weights are read."""
    path = Path(__file__).parents[1] / "cases" / "tiny_mars"
    generator = Generator.load(path, strategy="comb", k=2, probe="mean")
    assert (generator.plan.name, generator.plan.asks) == ("comb", 2)
    with pytest.raises(ValueError, match="k belongs to strategy chain or comb"):
        Generator.load("nowhere", strategy="mars", k=2)
    with pytest.raises(ValueError, match="needs a draft model"):
        Generator.load("nowhere", strategy="speculative")
    with pytest.raises(ValueError, match=r"k belongs to strategy chain or comb .* not to ar"):
        Generator.load(path, k=2)  # what "auto" takes here
