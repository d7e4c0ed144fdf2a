"""Every strategy: AR's own answers, and what a plain Python loop without a cache makes of it."""

import contextlib
import dataclasses
import functools
import random
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import strategies_reference as reference
from decoding_helpers import END, MASK, PAD, pretrained
from strategies_helpers import LANES, MODELS, STRATEGIES, base, blurred, ids, of, prompts_of, quick_compilation

from marsjax.decoding.proposers import trees
from marsjax.decoding.proposers.draft_model import DraftModel

SETTINGS = (
    {"max_new_tokens": [1 + i % 32 for i in range(64)]},
    {"max_new_tokens": 32, "temperature": [0.7, 1.5] * 32, "top_p": [1.0, 0.9, 0.8, 1.0] * 16, "seed": range(64)},
)


@pytest.fixture(autouse=True)
def quickly(request):
    """Two strategies are compiled as users have them, the others sooner: that is most of the time these tests take."""
    asked = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    well = asked.get("name") in ("dynamic", "draft") and asked.get("model") != "demo_mars"
    with contextlib.nullcontext() if well else quick_compilation():
        yield


@functools.cache
def answers_of_ar(model):
    return [ids(base(model).generate(prompts_of(model, 64), **options)) for options in SETTINGS]


@functools.cache
def decoder(model, blur=False):
    return reference.Model((blurred if blur else pretrained)(model).model, (MASK, PAD), MASK)


CASES = [
    *((name, model, LANES, None) for name in STRATEGIES for model in MODELS),
    ("draft", "tiny_mars", LANES, "tiny_mars"),
    ("draft", "tiny_mars", LANES, "tiny_random"),
    ("jacobi", "tiny_mars", 1, None),
    ("lookup", "tiny_mars", 3, None),
    ("dynamic", "demo_mars", LANES, None),
    ("draft", "demo_mars", LANES, None),
]


# Accepted drafts a step that occur often. Lookup reaches further only in a text that repeats itself.
DEEPEST = {"draft-masks": 3, "jacobi": 3, "block": 0, ("lookup", "tiny_random"): 1}


@pytest.mark.parametrize(("name", "model", "lanes", "draft"), CASES)
def test_equals_ar_through_the_queue(name, model, lanes, draft):
    """64 prompts, limits of every size, greedily and coupled: every depth of acceptance occurs."""
    generator, runs = of(name, model, lanes, draft), Counter()
    for options, expected in zip(SETTINGS, answers_of_ar(model), strict=True):
        results = generator.generate(prompts_of(model, 64), **options)
        assert ids(results) == expected
        runs.update(size for r in results for size in r.chunks if size)
    deepest = 1 if draft == "tiny_random" else DEEPEST.get((name, model), DEEPEST.get(name, 2))
    assert all(runs[size] > 4 for size in range(1, deepest + 2)), runs
    if name == "block":
        assert set(runs) == {1}  # τ = 1: a token a forward


def expected_of(name, model, prompt, *, limit, tau=1.0, measure="probability"):
    options, target, how = STRATEGIES[name], decoder(model), {"limit": limit, "end": END}
    if options["strategy"] in ("lookup", "jacobi"):
        decode = reference.decode_lookup if options["strategy"] == "lookup" else reference.decode_jacobi
        return decode(target, prompt, k=options["k"], **how)
    if options["strategy"] == "speculative":
        draft = decoder(model, blur=True)
        windows = {key: options[key] for key in ("window", "draft_window") if key in options}
        return reference.decode_speculative(
            target, draft, prompt, k=options["k"], tau=tau, measure=measure, **windows, **how
        )
    probe = None
    if "probe" in options:
        names = {"probe": "start", "probe_lambda": "rate", "probe_velocity": "memory"}
        probe = {names[key]: options[key] for key in names if key in options}
    form = options["strategy"]
    if form == "tree":
        widths = options.get("widths")
        form = ("static", widths) if widths else ("dynamic", options["block_complexity"] // (options["k"] + 1) - 1)
    return reference.decode_masks(
        target, prompt, k=options.get("k", 2), form=form, tau=tau, measure=measure, probe=probe,
        lookup=options.get("lookup", 0), **how,
    )  # fmt: skip


MIXED = ("static", "dynamic", "static-zero", "draft-masks")  # strategies in which τ has a meaning, one of each kind
TAUS = {
    "tiny_mars": {"probability": (1.0, 0.95, 0.6), "margin": (1.0, 0.7), "entropy": (0.0, 0.4)},
    "tiny_random": {"probability": (1.0, 0.0213, 0.0195), "margin": (1.0, 0.0005), "entropy": (0.0, 4.2)},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "block"])
def test_equals_decoding_without_a_cache(name, model):
    """Tokens, forwards and accepted counts; of the mixture with τ too."""
    prompts, draw = prompts_of(model, 16, seed=3), random.Random(4)
    limits = [draw.randrange(1, 33) for _ in prompts]
    measures = [
        draw.choice(("probability", "margin", "entropy") if name in MIXED else ("probability",)) for _ in limits
    ]
    taus = [draw.choice(TAUS[model][m]) if name in MIXED else None for m in measures]
    results = of(name, model).generate(prompts, max_new_tokens=limits, tau=taus, measure=measures)
    for prompt, limit, tau, measure, result in zip(prompts, limits, taus, measures, results, strict=True):
        how = {} if tau is None else {"tau": tau, "measure": measure}
        expected = expected_of(name, model, prompt, limit=limit, **how)
        assert (result.ids, result.chunks) == expected, (prompt, how, limit)


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_the_block_cache_wait_for_each_other(model):
    """Tokens, accepted counts and the forward that gave each, of batches in lock step."""
    generator, draw, waited = of("block", model), random.Random(6), 0
    for seed in range(3):
        prompts = prompts_of(model, LANES, seed=seed)
        limits = [draw.randrange(1, 33) for _ in prompts]
        taus = [draw.choice(TAUS[model]["probability"]) for _ in prompts]
        expected, by = reference.decode_block(
            decoder(model), prompts, size=STRATEGIES["block"]["cache_block"], taus=taus, limits=limits, end=END
        )
        engine = generator.engine()
        specs = zip(prompts, limits, taus, strict=True)
        requests = [engine.submit(generator.spec(p, max_new_tokens=limit, tau=tau)) for p, limit, tau in specs]
        engine.run()
        assert [r.result.ids for r in requests] == expected
        assert [[c for c in r.result.chunks if c] for r in requests] == [list(Counter(row).values()) for row in by]
        assert [r.forwards for r in requests] == [row[-1] for row in by]
        assert engine.statistics.steps == max(row[-1] for row in by)
        waited += sum(row[-1] - len(set(row)) for row in by)
    assert waited > 50


# --- broken pieces: strategies verify, so what is wrong with a draft shows in the counts, never in the tokens ---


@dataclasses.dataclass(frozen=True)
class Shuffled(trees.Dynamic):
    def of(self, *step):
        drafts = super().of(*step)
        return dataclasses.replace(drafts, tokens=jnp.roll(drafts.tokens, 1, axis=1))


@dataclasses.dataclass(frozen=True)
class NotRolledBack(DraftModel):
    def observe(self, network, params, controls, mine, seen):
        return mine


def with_proposer(generator, proposer):
    other = generator.with_strategy(strategy="ar")
    strategy = dataclasses.replace(generator.runtime.strategy, proposer=proposer)
    other.runtime = dataclasses.replace(generator.runtime, strategy=strategy)
    return other


def accepted(results):
    return sum(len(r.ids) - r.forwards for r in results)


def test_a_shuffled_tree_costs_forwards_and_changes_nothing():
    good, prompts = of("dynamic"), prompts_of("tiny_mars", 24)
    proposer = good.runtime.strategy.proposer
    broken = dataclasses.replace(proposer, tree=Shuffled(**dataclasses.asdict(proposer.tree)))
    options = {"max_new_tokens": 32, "temperature": 0.7, "seed": range(24)}
    right, wrong = (g.generate(prompts, **options) for g in (good, with_proposer(good, broken)))
    assert ids(wrong) == ids(right)
    assert accepted(wrong) < 0.8 * accepted(right)


def test_a_draft_cache_of_another_text_costs_forwards_and_changes_nothing():
    """Few of them: one stale entry is seldom seen to matter."""
    good, prompts = of("draft"), prompts_of("tiny_mars", 24)
    proposer = good.runtime.strategy.proposer
    broken = NotRolledBack(**{f.name: getattr(proposer, f.name) for f in dataclasses.fields(proposer)})
    options = {"max_new_tokens": 32, "ignore_eos": True}
    right, wrong = (g.generate(prompts, **options) for g in (good, with_proposer(good, broken)))
    assert ids(wrong) == ids(right)
    assert accepted(wrong) < accepted(right)


# --- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verification", "draws"),
    [
        *(("dynamic", verification, 2048) for verification in ("coupled", "rejection")),
        *(("draft", verification, 2048) for verification in ("coupled", "rejection")),
        ("jacobi", "rejection", 4096),
    ],
)
def test_distribution_of_three_tokens(name, verification, draws):
    """Chi-square of answers against the model's own distribution, each token given those before it."""
    prompt, temperature, tokens = [50, 9, 4, 20, 51, 30], 4.0, 3
    options = STRATEGIES[name] | ({"draft": blurred("tiny_mars")} if name == "draft" else {})
    results = base("tiny_mars").with_strategy(**options).generate(
        [prompt] * draws, max_new_tokens=tokens, temperature=temperature, top_k=4, seed=range(draws), ignore_eos=True,
        verification=verification,
    )  # fmt: skip
    seen = Counter(tuple(r.ids) for r in results)

    def top4(ids):
        logits = decoder("tiny_mars").logits(ids)[-1] / temperature
        return reference.softmax(np.where(logits < np.sort(logits)[-4], -np.inf, logits))

    expected = {(): float(draws)}
    for _ in range(tokens):
        expected = {
            (*ids, int(token)): n * p[token]
            for ids, n in expected.items()
            for p in [top4([*prompt, *ids])]
            for token in np.flatnonzero(p)
        }
    assert set(seen) <= set(expected)
    cells = [ids for ids, n in expected.items() if n >= 5]
    statistic = sum((seen[c] - expected[c]) ** 2 / expected[c] for c in cells)
    rest = draws - sum(expected[c] for c in cells)
    statistic += (draws - sum(seen[c] for c in cells) - rest) ** 2 / max(rest, 1)
    assert len(cells) > 20
    assert statistic < len(cells) + 5 * np.sqrt(2 * len(cells))  # 5 standard deviations
    assert sum(len(r.chunks) < tokens for r in results) > 100  # drafts were accepted
