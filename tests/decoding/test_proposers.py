"""Every strategy: AR's own answers, and what a plain Python loop without a cache makes of it."""

import dataclasses
import functools
import random
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import strategies_reference as reference
from decoding_helpers import END, MASK, PAD, pretrained
from strategies_helpers import LANES, MODELS, MOST, STRATEGIES, base, ids, marked, of, prompts_of

from marsjax.decoding.proposers import trees
from marsjax.decoding.proposers.draft_model import DraftModel

SETTINGS = (
    {"max_new_tokens": [1 + i % 32 for i in range(64)]},
    {"max_new_tokens": 32, "temperature": [0.7, 1.5] * 32, "top_p": [1.0, 0.9, 0.8, 1.0] * 16, "seed": range(64)},
)


@functools.cache
def answers_of_ar(model):
    return [ids(base(model).generate(prompts_of(model, 64), **options)) for options in SETTINGS]


@functools.cache
def decoder(model):
    return reference.Model(pretrained(model).model, (MASK, PAD), MASK)


CASES = [
    *((name, model, LANES, None) for name in STRATEGIES for model in MODELS),
    ("draft", "tiny_mars", LANES, "tiny_mars"),
    ("draft", "tiny_mars", 1, None),
    ("dynamic", "tiny_mars", 3, None),
    ("dynamic", "demo_mars", LANES, None),
    ("draft-masks", "demo_mars", LANES, None),
    ("block", "demo_mars", LANES, None),
]


@pytest.mark.parametrize(("name", "model", "lanes", "draft"), CASES)
def test_equals_ar_through_the_queue(name, model, lanes, draft):
    """64 prompts, limits of every size, greedily and coupled: every depth of acceptance occurs."""
    generator, runs = of(name, model, lanes, draft), Counter()
    for options, expected in zip(SETTINGS, answers_of_ar(model), strict=True):
        results = generator.generate(prompts_of(model, 64), **options)
        assert ids(results) == expected
        runs.update(size for r in results for size in r.chunks)
    if name == "block":
        assert set(runs) <= {0, 1}  # τ = 1: a token a forward
    else:
        least = 1 if name in ("lookup", "jacobi") else 4  # the simplest are seldom right so far ahead
        assert all(runs[size] > least for size in range(1, MOST.get(name, 2) + 2)), runs


def expected_of(name, model, prompt, *, limit, tau=1.0, measure="probability"):
    options, target, how = STRATEGIES[name], decoder(model), {"limit": limit, "end": END}
    if options["strategy"] in ("lookup", "jacobi"):
        decode = reference.decode_lookup if options["strategy"] == "lookup" else reference.decode_jacobi
        return decode(target, prompt, k=options["k"], **how)
    if options["strategy"] == "speculative":
        draft = decoder("tiny_random" if model == "tiny_mars" else "tiny_mars")
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


MIXED = ("static", "dynamic", "comb-last", "draft-masks")  # strategies in which τ has a meaning, one of each kind
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
    measures = [draw.choice(("probability", "margin", "entropy") if name in MIXED else ("probability",)) for _ in limits]
    taus = [draw.choice(TAUS[model][m]) if name in MIXED else None for m in measures]
    results = of(name, model).generate(prompts, max_new_tokens=limits, tau=taus, measure=measures)
    for prompt, limit, tau, measure, result in zip(prompts, limits, taus, measures, results, strict=True):
        how = {} if tau is None else {"tau": tau, "measure": measure}
        expected = expected_of(name, model, prompt, limit=limit, **how)
        assert (result.ids, result.chunks) == expected, (prompt, how, limit)
