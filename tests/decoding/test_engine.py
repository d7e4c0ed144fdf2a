"""Lanes and queue: nobody waits for nobody, everybody gets what they would get alone, nothing compiles."""

import itertools
import random
import threading

import numpy as np
import pytest
from decoding_helpers import generator, pretrained, script, script_batch

import marsjax.decoding.engine
from marsjax.decoding import Generator
from marsjax.decoding.engine import QueueFull

PROMPT = [50, 3, 9, 21, 51]
OPTIONS = {"ignore_eos": True}


def submit(engine, gen, prompt=PROMPT, **options):
    return engine.submit(gen.spec(prompt, **({"max_new_tokens": 8} | options)))


@pytest.mark.parametrize("strategy", ["ar", "mars", "comb"])
def test_two_hundred_requests_on_eight_lanes(strategy):
    """Forwards at most 1.1 times those of perfectly packed lanes, and every answer that of its solo run."""
    gen = generator("tiny_mars", strategy, lanes=8, **({"k": 4} if strategy == "comb" else {}))
    draw = random.Random(7)
    asked = [
        (
            [draw.randrange(2, 64) for _ in range(draw.randrange(1, 24))],
            {
                "max_new_tokens": draw.randrange(1, 40),
                "temperature": draw.choice((0.0, 0.0, 0.9)),
                "seed": draw.randrange(2**32),
                "ignore_eos": draw.random() < 0.5,
            }
            | ({} if strategy == "ar" else {"tau": draw.choice((1.0, 0.9, 0.5))}),
        )
        for _ in range(200)
    ]
    engine = gen.engine(8)
    requests = [submit(engine, gen, prompt, **options) for prompt, options in asked]
    engine.run()
    sums = engine.statistics
    forwards = [r.result.forwards for r in requests]
    assert sums.forwards == sum(forwards)
    assert sums.new_tokens == sum(len(r.result.ids) for r in requests) == sum(n * c for n, c in sums.runs.items())
    assert sums.steps <= 1.1 * -(-sum(forwards) // 8)
    for i in draw.sample(range(200), 25):
        alone = gen.generate(asked[i][0], **asked[i][1])
        assert (alone.ids, alone.chunks) == (requests[i].result.ids, requests[i].result.chunks)


def test_nothing_compiles_after_warm_up(compilations):
    for strategy in ("mars", "comb"):
        gen = generator("tiny_mars", strategy, lanes=4, **({"k": 2} if strategy == "comb" else {}))
        engine = gen.engine(4)
        engine.warm_up(longest=150)
        compilations.clear()
        draw = random.Random(2)
        for n in [*range(1, 30), 60, 61, 62, 90, 93, 97, 100, 128]:
            for tau in (1.0, 0.95, np.float32(0.9), 1):
                verifications = ("coupled", "rejection") if gen.plan.drafts else ("coupled",)
                measures = ("probability", "entropy", "margin") if tau == 1.0 else ("probability",)
                submit(
                    engine, gen, [50] * n, tau=tau, max_new_tokens=draw.randrange(1, 20), seed=n,
                    temperature=draw.choice((0, 0.5, 1)), top_k=draw.choice((None, 3, 10**9)),
                    top_p=draw.choice((None, 0.5)), measure=draw.choice(measures), stop_ids=[4] * draw.randrange(3),
                    verification=draw.choice(verifications), ignore_eos=draw.random() < 0.5,
                )  # fmt: skip
            engine.turn(draw.randrange(1, 9))
            while engine.running and draw.random() < 0.2:  # until the cache may shrink
                engine.turn()
        engine.set_tau(0.8)
        engine.cancel(engine.running[0])
        engine.run()
        assert engine.statistics.requests == 4 * 37
        assert not compilations


def test_a_cancelled_request_frees_its_lane_and_keeps_what_it_has():
    gen = generator("tiny_mars", lanes=1)
    engine = gen.engine(1)
    first, second, third = (submit(engine, gen, max_new_tokens=30, **OPTIONS) for _ in range(3))
    engine.turn(3)
    engine.cancel(first)
    engine.cancel(second)  # waits still
    assert (first.result.finish_reason, len(first.result.ids)) == ("cancelled", 3)
    assert (second.result.finish_reason, second.result.ids) == ("cancelled", [])
    engine.cancel(first)  # again: nothing
    engine.run()
    assert third.result.ids == gen.generate(PROMPT, max_new_tokens=30, **OPTIONS).ids
    assert third.result.ids[:3] == first.result.ids
    assert (engine.statistics.requests, engine.statistics.cancelled) == (3, 2)


def test_a_full_queue_refuses():
    gen = generator("tiny_mars", lanes=1)
    engine = gen.engine(1, max_waiting=2)
    for _ in range(2):
        submit(engine, gen)
    with pytest.raises(QueueFull, match="2 requests wait"):
        submit(engine, gen)
    engine.turn(1)  # one runs now
    submit(engine, gen)
    engine.run()
    assert engine.statistics.requests == 3


def test_an_overlong_prompt_is_refused_before_it_waits():
    gen = generator("tiny_mars", lanes=1)
    with pytest.raises(ValueError, match="positions"):
        gen.spec([5] * 600)


def test_tau_of_one_request_or_of_all():
    sure = script((3, 4, 5, 6, 7, 8, 9, 10), (0.99, 0.97, 0.50, 0.99, 0.99, 0.94, 0.99, 0.99))
    batch = script_batch(sure, 4, rows=2, tau=0.95)
    first, second = batch.requests
    batch.engine.set_tau(1.0, first)
    batch.engine.turn(1)
    assert (len(first.answer.ids), len(second.answer.ids)) == (1, 2)
    batch.engine.set_tau(0.3)
    batch.engine.run()
    assert (first.result.chunks, second.result.chunks) == ([1, 4, 3], [2, 4, 2])


def test_tau_means_nothing_to_a_one_token_strategy():
    gen = generator("tiny_mars", "ar", lanes=1)
    engine = gen.engine(1)
    submit(engine, gen)
    engine.set_tau(1.0)
    with pytest.raises(ValueError, match="no meaning with strategy 'ar'"):
        engine.set_tau(0.9)
    with pytest.raises(ValueError, match="no meaning"):
        list(gen.stream(PROMPT, tau=lambda: 0.9))


def test_sizes_are_positive():
    for options in ({"lanes": 0}, {"prefill_chunk": 0}, {"lanes": True}):
        with pytest.raises(ValueError, match="positive integer"):
            Generator(pretrained("tiny_mars"), strategy="ar", **options)


def test_a_row_that_ends_in_its_first_step_and_the_cache_that_grows():
    gen = generator("tiny_mars", lanes=2)
    engine = gen.engine(2)
    long = submit(engine, gen, max_new_tokens=50, **OPTIONS)
    engine.turn(4)
    assert engine._capacity == 64
    short = submit(engine, gen, max_new_tokens=1, **OPTIONS)
    larger = submit(engine, gen, [50, 7, 9], max_new_tokens=100, **OPTIONS)
    engine.run()
    assert (short.result.finish_reason, len(short.result.ids), short.result.forwards) == ("length", 1, 1)
    assert engine._state is None
    for request in (long, larger):
        alone = gen.generate(request.spec.prompt, max_new_tokens=request.spec.max_new_tokens, **OPTIONS)
        assert request.result.ids == alone.ids


def test_statistics():
    sure = script((3, 4, 5, 6, 7, 8, 9, 10), (0.99, 0.97, 0.50, 0.99, 0.99, 0.94, 0.99, 0.99))
    batch = script_batch(sure, 4, rows=3, tau=0.95)
    batch.engine.run()
    sums = batch.engine.statistics
    assert (sums.requests, sums.prompt_tokens, sums.new_tokens, sums.forwards, sums.steps) == (3, 9, 24, 9, 3)
    assert sums.runs == {2: 3, 3: 6}
    assert sums.accepted_by_depth == [1.0, 2 / 3]
    assert sums.tokens_per_forward == 24 / 9
    assert sums.slots == 3 * (4 + 7 + 7)  # the first step has one token pending a row
    assert sums.head_rows == 3 * 3 * 4


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("start", KeyboardInterrupt),
        *itertools.product(("admit", "prefill", "advance"), (MemoryError, KeyboardInterrupt)),
    ],
)
def test_a_turn_that_fails_takes_its_requests_with_it_and_no_others(monkeypatch, program, error):
    gen = generator("tiny_mars", lanes=1)
    engine = gen.engine(1)
    first, second = (submit(engine, gen, max_new_tokens=9, **OPTIONS) for _ in range(2))

    def broken(*_, **__):
        raise error("here")

    with monkeypatch.context() as patch:
        patch.setattr(marsjax.decoding.engine, program, broken)
        with pytest.raises(error):
            engine.turn(1)
    assert not engine.running
    engine.run()
    alone = gen.generate(PROMPT, max_new_tokens=9, **OPTIONS)
    assert second.result.ids == alone.ids
    if program == "start":  # nobody had left the queue yet
        assert first.result.ids == alone.ids
    else:
        assert first.error is not None
        with pytest.raises(type(first.error)):
            list(engine.stream(first))


@pytest.mark.parametrize("program", ["start", "resize"])
def test_no_memory_for_a_longer_cache_is_the_fault_of_the_longest_alone(monkeypatch, program):
    gen = generator("tiny_mars", lanes=2)
    engine = gen.engine(2)
    running = submit(engine, gen, max_new_tokens=20, **OPTIONS)
    if program == "resize":
        engine.turn(3)
    long = submit(engine, gen, max_new_tokens=200, **OPTIONS)
    short = submit(engine, gen, max_new_tokens=5, **OPTIONS)

    real = getattr(marsjax.decoding.engine, program)

    def broken(*arguments):
        if arguments[-1] > 64:
            raise MemoryError("too long")
        return real(*arguments)

    monkeypatch.setattr(marsjax.decoding.engine, program, broken)
    engine.run()
    assert isinstance(long.error, MemoryError)
    alone = gen.generate(PROMPT, max_new_tokens=20, **OPTIONS).ids
    assert (running.result.ids, short.result.ids) == (alone, alone[:5])


def test_a_generator_serves_several_threads():
    gen = generator("tiny_mars", lanes=2)
    expected = [gen.generate([i, 6], max_new_tokens=8, **OPTIONS).ids for i in range(2, 10)]
    got = {}

    def ask(i):
        got[i] = [gen.generate([i + 2, 6], max_new_tokens=8, **OPTIONS).ids for _ in range(40)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == expected[i] for i in range(8) for answer in got[i])


def test_lanes_of_answers_that_end_by_a_stop_string_are_refilled_at_once(bytes_tokenizer):
    """Also while others wait: at most 1.1 times the forwards of perfect packing."""
    text = bytes_tokenizer("abcdefgh.ijk")["input_ids"]
    scripted = script(text, [0.9] * len(text), vocab=258)
    batch = script_batch(scripted, 1, rows=40, lanes=4, tokenizer=bytes_tokenizer, stop=["."], max_new_tokens=12)
    batch.engine.run()
    assert {r.text for r in batch.results()} == {"abcdefgh"}
    assert batch.engine.statistics.steps <= 1.1 * 9 * 10


def test_seconds_are_those_of_the_row():
    gen = generator("tiny_mars", lanes=2)
    short, long = gen.generate([PROMPT, PROMPT], max_new_tokens=[2, 100], **OPTIONS)
    assert 0 < short.seconds < long.seconds / 20


def test_wrong_use_is_refused():
    gen, ar = generator("tiny_mars", lanes=1), generator("tiny_mars", "ar", lanes=1)
    engine = gen.engine(1)
    with pytest.raises(TypeError, match=r"Generator\.spec"):
        engine.submit("a text")
    with pytest.raises(ValueError, match="no meaning with strategy 'ar'"):
        ar.engine(1).submit(gen.spec(PROMPT, tau=0.5))
    with pytest.raises(ValueError, match="rejection"):
        gen.spec(PROMPT, verification="rejection")
    with pytest.raises(ValueError, match="512 positions"):
        engine.warm_up(longest=513)
    for longest in (0, 1.5, True, "x"):
        with pytest.raises(ValueError, match="longest must be a positive integer"):
            engine.warm_up(longest=longest)
    with pytest.raises(ValueError, match="max_waiting"):
        gen.engine(1, max_waiting=-1)


def test_nan_does_not_outlive_its_request():
    poisoned = script((3, 4, 5), (0.9, 0.9, 0.9))
    network, (tokens, sure, length), n = poisoned
    batch = script_batch((network, (tokens, np.where(np.arange(64) == 1, np.nan, sure), length), n), 4, rows=1)
    batch.engine.run()
    assert isinstance(batch.requests[0].error, FloatingPointError)
    assert batch.engine.statistics.failed == 1
    assert batch.engine.idle


def test_streams_beside_each_other():
    gen = generator("tiny_mars", lanes=2)
    engine = gen.engine(2)
    one, two = (submit(engine, gen, [50, 7, 9], max_new_tokens=n, **OPTIONS) for n in (12, 30))
    chunks = list(engine.stream(one))
    assert [i for c in chunks for i in c.ids] == one.result.ids == chunks[-1].result.ids
    assert not two.ended
    assert [i for c in engine.stream(two, steps=5) for i in c.ids] == two.result.ids
    assert two.result.ids[:12] == one.result.ids
    three, four = (submit(engine, gen, [50, 7, 9], max_new_tokens=n, **OPTIONS) for n in (30, 2))
    list(engine.stream(three))
    assert [i for c in engine.stream(four) for i in c.ids] == four.result.ids  # ended long ago
    with pytest.raises(ValueError, match="not one of this engine"):
        list(gen.engine(1).stream(foreign := submit(engine, gen)))
    with pytest.raises(ValueError, match="not one of this engine"):
        gen.engine(1).cancel(foreign)
    engine.run()
    assert foreign.result.finish_reason != "cancelled"


def test_the_cache_shrinks_when_only_short_requests_are_left():
    gen = generator("tiny_mars", lanes=2)
    engine = gen.engine(2)
    long = submit(engine, gen, max_new_tokens=110, **OPTIONS)
    rest = [submit(engine, gen, [50, 7, n], max_new_tokens=40, temperature=0.9, seed=n, **OPTIONS) for n in range(6)]
    engine.turn(1)
    assert engine._capacity == 128
    while not long.ended:
        engine.turn()
    assert engine.running
    engine.turn(1)
    assert engine._capacity == 64
    engine.run()
    for n, request in enumerate(rest):
        alone = gen.generate([50, 7, n], max_new_tokens=40, temperature=0.9, seed=n, **OPTIONS)
        assert request.result.ids == alone.ids
