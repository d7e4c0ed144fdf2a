"""Queue, lanes and cache lengths under every kind of proposer state."""

import dataclasses
import random

import numpy as np
import pytest
from decoding_helpers import MASK, PAD, pretrained
from flax import nnx
from strategies_helpers import LANES, STRATEGIES, base, blurred, ids, marked, of, prompts_of, quick_compilation

from marsjax.decoding import Generator

KINDS = ("dynamic-lookup-mean", "draft", "jacobi", "block")  # one of each kind of state
OPTIONS = {"ignore_eos": True}
POISON = 40


@pytest.fixture(autouse=True, scope="module")
def quickly():
    with quick_compilation():
        yield


def submit(engine, generator, prompts, limits, **options):
    specs = (generator.spec(p, max_new_tokens=n, **OPTIONS, **options) for p, n in zip(prompts, limits, strict=True))
    return [engine.submit(spec) for spec in specs]


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_that_grows_and_shrinks_lanes_that_are_refilled_and_rows_that_are_cancelled(name):
    generator, prompts = of(name), prompts_of("tiny_mars", 24, seed=8)
    engine, sampled = generator.engine(), {"temperature": 0.7, "seed": 5}
    first = submit(engine, generator, prompts[:5], [31, 12, 9, 30, 25], **sampled)
    engine.turn(3)
    assert engine._capacity == 64
    engine.cancel(first[3])
    [long] = submit(engine, generator, prompts[5:6], [100], **sampled)  # alone into a free lane
    engine.turn(2)
    assert engine._capacity == 128
    rest = submit(engine, generator, prompts[6:], [36 - len(p) for p in prompts[6:]], **sampled)
    while len(long.answer.ids) < 70:
        engine.turn(4)
    engine.cancel(long)
    engine.turn(1)
    assert engine._capacity == 64
    assert engine.running
    engine.run()
    requests, cancelled = [*first, long, *rest], (first[3], long)
    options = {"max_new_tokens": [r.spec.max_new_tokens for r in requests]} | sampled | OPTIONS
    undisturbed = generator.generate(prompts, **options)
    expected = base("tiny_mars").generate(prompts, **options)
    for request, alone, ar in zip(requests, undisturbed, expected, strict=True):
        got = request.result
        if request in cancelled:
            assert got.finish_reason == "cancelled"
            assert got.ids == ar.ids[: len(got.ids)]
        else:
            assert got.ids == ar.ids
            assert name == "block" or got.chunks == alone.chunks  # its rows wait for their neighbours
    assert (engine.statistics.requests, engine.statistics.cancelled) == (24, 2)


def test_nothing_compiles_after_warm_up(compilations):
    for name in KINDS:
        generator, draw = of(name), random.Random(2)
        engine, most = generator.engine(), 64 - generator.runtime.strategy.slack
        engine.warm_up(longest=most)
        compilations.clear()
        for i, prompt in enumerate(prompts_of("tiny_mars", 20, seed=9)):
            options = {"verification": "rejection"} if i % 3 == 0 and generator.plan.drafts else {}
            options |= {"tau": (1.0, 0.9, np.float32(0.5))[i % 3]} if generator.runtime.strategy.takes_tau else {}
            submit(
                engine, generator, [prompt], [draw.choice((3, 9, most - len(prompt)))], seed=i,
                temperature=draw.choice((0, 0.8)), top_k=draw.choice((None, 5)), top_p=draw.choice((None, 0.7)),
                **options,
            )  # fmt: skip
            engine.turn(draw.randrange(1, 7))
        engine.run()
        assert engine.statistics.requests == 20
        assert not compilations, name


@pytest.mark.parametrize("name", [*KINDS, "draft-masks", "lookup"])
def test_the_last_entry_of_the_cache(name):
    """Requests that need all that the slack leaves: a write past the end would move back, over good entries."""
    generator = of(name)
    most = 64 - generator.runtime.strategy.slack
    prompts = [p for p in prompts_of("tiny_mars", 20, seed=11) if len(p) < 30][:LANES]
    limits = [most - len(p) for p in prompts]
    engine = generator.engine()
    requests = submit(engine, generator, prompts, limits, temperature=0.7, seed=3)
    engine.turn(1)
    assert engine._capacity == 64
    assert engine._lengths(most + 1)[-1] == 96
    engine.run()
    alone = base("tiny_mars").generate(prompts, max_new_tokens=limits, temperature=0.7, seed=3, **OPTIONS)
    assert ids(r.result for r in requests) == ids(alone)


@pytest.mark.parametrize("name", [*STRATEGIES])
def test_one_token_prompts_and_prompts_of_very_different_lengths(name):
    generator = of(name)
    prompts = [[7], [50], [50, 3], [9] * 34, [50, 4, 5, 21, 51], list(range(2, 33)), [8], [11, 12, 13]]
    limits = [5, 20, 1, 20, 20, 2, 30, 7]
    expected = base("tiny_mars").generate(prompts, max_new_tokens=limits, **OPTIONS)
    together = generator.generate(prompts, max_new_tokens=limits, **OPTIONS)
    assert ids(together) == ids(expected)
    if name != "block":
        one_by_one = [generator.generate([p] + [[5]] * 7, max_new_tokens=n, **OPTIONS)[0] for p, n in
                      zip(prompts[:3], limits, strict=False)]  # fmt: skip
        assert [(r.ids, r.chunks) for r in one_by_one] == [(r.ids, r.chunks) for r in together[:3]]


@pytest.mark.parametrize("name", KINDS)
def test_a_nan_request_does_not_poison_its_lane(name):
    """One token's embedding is NaN; the requests behind the one that has it, in the same lane, are answered well."""
    loaded = marked("tiny_mars")
    model = nnx.clone(loaded.model)
    table = model.embed_table.embedding
    table[...] = table[...].at[POISON].set(np.nan)
    broken = dataclasses.replace(loaded, model=model)
    how = {"prefill_chunk": 16, "lanes": LANES, "forbidden": (MASK, PAD, POISON)}
    options = STRATEGIES[name] | ({"draft": blurred("tiny_mars")} if name == "draft" else {})
    engine = (generator := Generator(broken, strategy="ar", **how).with_strategy(**options)).engine()
    prompts = [[p for p in prompt if p != POISON] or [5] for prompt in prompts_of("tiny_mars", 40, seed=13)]
    bad = [[50, 3, POISON, 7], [POISON]]
    limits = [4 + i % 20 for i in range(40)]
    requests = submit(engine, generator, [*prompts[:12], *bad, *prompts[12:]], [*limits[:12], 20, 20, *limits[12:]])
    engine.run()
    failed = [r for r in requests if r.error is not None]
    assert failed == requests[12:14]
    assert all(isinstance(r.error, FloatingPointError) for r in failed)
    good = Generator(pretrained("tiny_mars"), strategy="ar", **how)
    expected = good.generate(prompts, max_new_tokens=limits, **OPTIONS)
    assert ids(r.result for r in requests if r.error is None) == ids(expected)
    assert engine.statistics.failed == 2


COSTS = {  # slots and rows of logits a step, forwards of the draft model for each of the target's
    "static": (3 * 6, 6 + 2, 0),
    "dynamic": (3 * 6, 6 + 2, 0),
    "dynamic-lookup-mean": (3 * 6, 6 + 2, 0),
    "chain-last": (3 + 2, 3 + 2, 0),
    "static-zero": (3 * 4, 4 + 2, 0),
    "draft": (3, 3, 2),
    "draft-masks": (None, 4 + 2, 2),  # fewer slots where no row has several tokens pending
    "lookup": (5, 5, 0),
    "jacobi": (4, 4, 0),
    "block": (6, 6, 0),
}


@pytest.mark.parametrize("name", COSTS)
def test_statistics(name):
    slots, head_rows, draft_forwards = COSTS[name]
    generator, prompts = of(name), prompts_of("tiny_mars", LANES, seed=5)
    engine = generator.engine()
    requests = submit(engine, generator, prompts, [3 + i for i in range(LANES)])
    engine.run()
    sums, results = engine.statistics, [r.result for r in requests]
    assert sums.steps == max(r.forwards for r in requests)  # the longest row's, and nobody is refilled
    assert sums.head_rows == sums.steps * LANES * head_rows
    if slots is not None:
        assert sums.slots == sums.steps * LANES * slots
    else:
        assert sums.steps * (1 + 3 + 4 * 2) <= sums.slots / LANES <= sums.steps * (3 + 3 + 4 * 2)
    assert [r.draft_forwards for r in results] == [draft_forwards * r.forwards for r in results]
    assert sums.draft_forwards == draft_forwards * sums.forwards
    assert sums.new_tokens == sum(3 + i for i in range(LANES)) == sum(n * c for n, c in sums.runs.items())
