"""Self-verification: AR's own answers in fewer forwards, and what a plain Python loop without a cache makes of it."""

import contextlib
import functools
import itertools
import random
from collections import Counter

import decoding_reference as reference
import numpy as np
import pytest
from decoding_helpers import END, MASK, PAD, generator, pretrained
from strategies_helpers import LANES, MODELS, ids, prompts_of, quick_compilation

import marsjax.decoding.step
from marsjax.decoding import acceptance

SIZES = [(model, lanes, k) for model in (*MODELS, "demo_mars") for lanes in (1, 3, 8) for k in (2, 4, 8)]

# Greedily, and sampled: the noise of a position, met by draft and choice alike, makes even a random model guess itself.
SETTINGS = (
    {"max_new_tokens": [1 + i % 32 for i in range(64)]},
    {"max_new_tokens": 32, "temperature": [0.7, 1.5] * 32, "top_p": [1.0, 0.9, 0.8, 1.0] * 16, "seed": range(64)},
)


@functools.cache
def answers_of_ar(model):
    ar = generator(model, "ar", lanes=LANES)
    return [ids(ar.generate(prompts_of(model, 64), **options)) for options in SETTINGS]


@pytest.mark.filterwarnings("ignore:k 8 is beyond:UserWarning")
@pytest.mark.parametrize("strategy", ["chain", "comb"])
@pytest.mark.parametrize(("model", "lanes", "k"), SIZES)
def test_equals_ar_through_the_queue(model, strategy, lanes, k):
    """64 prompts, limits of every size: every depth of acceptance occurs."""
    verified = generator(model, strategy, k=k, lanes=lanes)
    runs, answers = Counter(), answers_of_ar(model)
    with contextlib.nullcontext() if lanes == LANES else quick_compilation():  # once as users have it is enough
        for options, expected in zip(SETTINGS, answers, strict=True):
            results = verified.generate(prompts_of(model, 64), **options)
            assert ids(results) == expected
            runs.update(size for r in results for size in r.chunks)
    deepest = k if model == "tiny_random" else min(k, 4)  # further than it was trained nobody guesses often
    assert all(runs[size] > 4 for size in range(1, deepest + 2)), runs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["chain", "comb"])
def test_equals_decoding_without_a_cache(model, strategy):
    """Tokens, forwards and accepted counts; also of the mixture with τ."""
    prompts = prompts_of(model, 24, seed=3)
    draw = random.Random(4)
    limits = [draw.randrange(1, 33) for _ in prompts]
    taus = [draw.choice((1.0, 0.95, 0.6) if model == "tiny_mars" else (1.0, 0.0213, 0.0195)) for _ in prompts]
    results = generator(model, strategy, k=4, lanes=LANES).generate(prompts, tau=taus, max_new_tokens=limits)
    for prompt, tau, limit, result in zip(prompts, taus, limits, results, strict=True):
        expected = reference.decode_verified(
            pretrained(model).model, prompt, plan=strategy, k=4, limit=limit, end=END, mask=MASK,
            forbidden=(MASK, PAD), tau=tau,
        )  # fmt: skip
        assert (result.ids, result.chunks) == expected, (prompt, tau, limit)


def test_a_broken_acceptance_is_noticed(monkeypatch):
    """What the tests above would say of a verifier that takes one draft too many."""
    walk = acceptance.walk

    def generous(parents, equal, sure, reach):
        return walk(parents, equal | (np.arange(equal.shape[1]) == 0), sure, reach)

    monkeypatch.setattr(marsjax.decoding.step.acceptance, "walk", generous)
    prompts = prompts_of("tiny_random", 8)
    # k = 3 is nobody else's, so that the broken program is nobody else's either.
    broken = generator("tiny_random", "comb", k=3, lanes=LANES).generate(prompts, max_new_tokens=30)
    assert ids(broken) != ids(generator("tiny_random", "ar", lanes=LANES).generate(prompts, max_new_tokens=30))


def test_the_mixture_lies_between_the_exact_and_the_fast():
    prompts = [p for p in prompts_of("tiny_mars", 48, seed=9) if p[0] == 50][:24]
    comb = generator("tiny_mars", "comb", k=4, lanes=LANES)
    rates = []
    for tau in (1.0, 0.9, 0.5):
        results = comb.generate(prompts, tau=tau, max_new_tokens=30)
        rates.append(sum(len(r.ids) for r in results) / sum(r.forwards for r in results))
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.parametrize(
    ("strategy", "verification"),
    [("ar", "coupled"), *itertools.product(("chain", "comb"), ("coupled", "rejection"))],
)
def test_distribution_of_two_tokens(strategy, verification):
    """Chi-square of 4,096 answers of two tokens against the model's own distribution, the second given the first."""
    options = {} if strategy == "ar" else {"k": 2}
    lanes = 256
    prompt, temperature, draws = [50, 9, 4, 20, 51, 30], 4.0, 4096
    results = generator("tiny_mars", strategy, lanes=lanes, **options).generate(
        [prompt] * draws, max_new_tokens=3, temperature=temperature, top_k=4, seed=range(draws), ignore_eos=True,
        verification=verification,
    )  # fmt: skip
    seen = Counter(tuple(r.ids[1:3]) for r in results)  # drafts exist from the second token on
    firsts = Counter(r.ids[0] for r in results)

    def top4(tokens):
        logits = reference.logits_of(pretrained("tiny_mars").model, tokens)[-1].astype(np.float64) / temperature
        logits[[MASK, PAD]] = -np.inf
        logits[logits < np.sort(logits)[-4]] = -np.inf
        p = np.exp(logits - logits.max())
        return p / p.sum()

    expected = np.zeros((66, 66))
    for first, p0 in zip(*(lambda p: (np.flatnonzero(p), p[p > 0]))(top4(prompt)), strict=True):
        assert abs(firsts[int(first)] - draws * p0) < 5 * np.sqrt(draws * p0) + 1
        p1 = top4([*prompt, int(first)])
        for second in np.flatnonzero(p1):
            expected[second] += p0 * p1[second] * np.pad(top4([*prompt, int(first), int(second)]), (0, 66))[:66]
    expected *= draws
    cells = [(a, b) for a in range(66) for b in range(66) if expected[a, b] >= 5]
    statistic = sum((seen[c] - expected[c]) ** 2 / expected[c] for c in cells)
    rest = draws - sum(expected[c] for c in cells)
    statistic += (draws - sum(seen[c] for c in cells) - rest) ** 2 / max(rest, 1)
    degrees = len(cells)
    assert degrees > 6
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)  # 5 standard deviations
    if strategy != "ar":
        assert sum(len(r.chunks) < 3 for r in results) > 100  # drafts were accepted
