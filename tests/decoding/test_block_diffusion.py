"""Block diffusion decoding against plain Python without a cache: the whole text in every forward."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import END, MASK, PAD
from decoding_reference import LENGTH
from flax import nnx
from strategies_helpers import LANES, MODELS, base, marked, quick_compilation

from marsjax import cli
from marsjax.attention import dense
from marsjax.decoding import Generator, step
from marsjax.decoding.engine import _idle_rows

TAUS = {
    "tiny_mars": {"probability": (1.0, 0.9, 0.5, 0.1), "margin": (1.0, 0.7), "entropy": (0.0, 0.4)},
    "tiny_random": {"probability": (1.0, 0.021, 0.0195, 0.1), "margin": (1.0, 0.0005), "entropy": (0.0, 4.24)},
}


@pytest.fixture(autouse=True, scope="module")
def quickly():
    with quick_compilation():
        yield


@functools.cache
def of(model, size, lanes=LANES):
    return base(model, lanes).with_strategy(strategy="block_diffusion", diffusion_block=size)


@functools.cache
def reference(model, size):
    """tokens → float64 logits; blocks see themselves and the blocks before them."""
    graphdef, params = nnx.split(marked(model).model)
    mask = np.array([[[j // size <= i // size for j in range(LENGTH)] for i in range(LENGTH)]])

    @jax.jit
    def run(params, tokens):
        model = nnx.merge(graphdef, params)
        positions = jnp.arange(LENGTH)[None]
        hidden, _ = model(tokens, positions=positions, attend=lambda q, k, v, s: (dense.attend(q, k, v, mask), s))
        return model.unembed(hidden)[0]

    def logits(tokens):
        rows = np.asarray(run(params, np.array([tokens + [0] * (LENGTH - len(tokens))], np.int32)), np.float64)
        rows[:, [MASK, PAD]] = -np.inf
        return rows

    return logits


def decode(model, prompt, *, size, limit, tau=1.0, measure="probability", end=END):
    """(ids, the forward after which each was known with all before it)."""
    text, by, forwards = list(prompt), [], 0
    while True:
        begin = len(text) // size * size
        block = text[begin:] + [None] * (begin + size - len(text))
        while None in block:
            rows = reference(model, size)([MASK if t is None else t for t in text[:begin] + block])
            forwards += 1
            sure = {}
            for i in (i for i, token in enumerate(block) if token is None):
                p = np.exp(rows[begin + i - 1] - rows[begin + i - 1].max())
                p /= p.sum()
                second, first = np.sort(p)[-2:]
                entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
                sure[i] = (
                    {"probability": first, "margin": first - second, "entropy": -entropy}[measure],
                    int(p.argmax()),
                )
            least = -tau if measure == "entropy" else tau
            is_ar = tau == (0 if measure == "entropy" else 1)
            surest = max(sure, key=lambda i: sure[i][0])
            for i, (confidence, token) in sure.items():
                if i == surest or (confidence >= least and not is_ar):
                    block[i] = token
            known = block.index(None) if None in block else size
            while len(text) < begin + known:
                text.append(block[len(text) - begin])
                by.append(forwards)
                if text[-1] == end or len(by) == limit:
                    return text[len(prompt) :], by


def check(model, size, rows, results):
    for (prompt, options), result in zip(rows, results, strict=True):
        ids, by = decode(model, prompt, size=size, **options)
        assert (result.ids, result.forwards) == (ids, by[-1]), (prompt, options)
        assert result.chunks == [by.count(f) for f in sorted(set(by))], (prompt, options)
        assert result.finish_reason == ("stop" if ids[-1] == END else "length")


def generate(generator, rows, **more):
    names = {"limit": "max_new_tokens"}
    options = {names.get(name, name): [row[1][name] for row in rows] for name in rows[0][1]}
    return generator.generate([prompt for prompt, _ in rows], **options, **more)


def rows_of(model, size, seed, measures=("probability",)):
    """Prompts of 1 to 2B tokens under every τ."""
    draw, rows = random.Random(seed), []
    for length in range(1, 2 * size + 1):
        for measure in measures:
            for tau in TAUS[model][measure]:
                prompt = [draw.randrange(2, 64) for _ in range(length)]
                if model == "tiny_mars" and length > 4:
                    prompt[-5:] = [50, draw.randrange(2, 12), draw.randrange(2, 12), draw.randrange(20, 24), 51]
                rows.append((prompt, {"limit": draw.randrange(1, 3 * size + 2), "tau": tau, "measure": measure}))
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_equals_decoding_without_a_cache(model, size):
    """A ragged batch, through the queue: rows are in the middle of different blocks."""
    rows = rows_of(model, size, seed=size)
    results = generate(of(model, size), rows)
    check(model, size, rows, results)
    if size > 2:
        assert {1, 2, 3} <= {c for r in results for c in r.chunks}
        assert any(r.forwards > len(r.chunks) for r in results)  # a later place was filled first
    for (_, options), result in zip(rows, results, strict=True):
        if options["tau"] == 1 and result.finish_reason == "length":
            assert result.forwards >= len(result.ids)


@pytest.mark.parametrize("model", MODELS)
def test_margin_and_entropy(model):
    rows = rows_of(model, 4, 1, measures=("margin", "entropy"))
    check(model, 4, rows, generate(of(model, 4), rows))


def test_at_tau_1_a_forward_gives_a_token():
    """None is spent on committing a block."""
    for n in (1, 3, 4, 7):
        result = of("tiny_random", 4).generate([5] * n, max_new_tokens=20 - n, ignore_eos=True)
        assert (len(result.ids), result.forwards) == (20 - n, 20 - n)


def test_rows_of_a_batch_equal_their_solo_runs():
    rows = rows_of("tiny_mars", 4, seed=9)[:16]
    options = {"temperature": [0.0, 0.8] * 8, "seed": list(range(16)), "top_k": [0, 9] * 8}
    together = generate(of("tiny_mars", 4), rows, **options)
    for i, row in enumerate(rows):
        [alone] = generate(of("tiny_mars", 4), [row], **{name: values[i] for name, values in options.items()})
        assert (alone.ids, alone.chunks, alone.forwards) == (
            together[i].ids, together[i].chunks, together[i].forwards,
        )  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 5, 8, 11, 20, 40])
def test_prompts_in_chunks_that_are_no_multiple_of_the_block(size):
    """Chunks of 16 tokens; prompts that fill the cache nearly to its end, where a write too far would move back."""
    draw, most = random.Random(size), 64 - size
    rows = [
        ([draw.randrange(2, 64) for _ in range(n)], {"limit": min(4, most - n), "tau": 0.021})
        for n in {1, most - 1, most - 2, most // 2, *range(max(1, most - 8), most - 1, 3)}
    ]
    engine = of("tiny_random", size).engine()
    generator = of("tiny_random", size)
    requests = [
        engine.submit(generator.spec(p, max_new_tokens=o["limit"], tau=o["tau"], ignore_eos=False)) for p, o in rows
    ]
    engine.turn(1)
    assert engine._capacity == 64
    engine.run()
    check("tiny_random", size, rows, [r.result for r in requests])


def test_the_last_chunk_of_a_prompt_begins_early_where_it_would_reach_past_the_cache():
    """Chunks of 15 in a cache of 192: the thirteenth would be moved back by the write, over good entries."""
    small, draw = of("tiny_random", 3), random.Random(4)
    large = Generator(
        marked("tiny_random"), strategy="block_diffusion", diffusion_block=3, prefill_chunk=48, lanes=LANES,
        forbidden=(MASK, PAD),
    )  # fmt: skip
    prompts = [[draw.randrange(2, 64) for _ in range(186)] for _ in range(LANES)]
    engine = small.engine()
    requests = [engine.submit(small.spec(p, max_new_tokens=3, ignore_eos=True)) for p in prompts]
    engine.turn(1)
    assert engine._capacity == 192
    engine.run()
    expected = large.generate(prompts, max_new_tokens=3, ignore_eos=True)
    assert [r.result.ids for r in requests] == [r.ids for r in expected]


def test_lanes_that_are_refilled_and_caches_that_grow():
    generator, draw = of("tiny_mars", 4), random.Random(3)
    engine = generator.engine()
    rows = [([draw.randrange(2, 64) for _ in range(draw.randrange(1, 40))], draw.randrange(1, 30)) for _ in range(30)]

    def submit(rows):
        return [engine.submit(generator.spec(p, max_new_tokens=n, tau=0.5, ignore_eos=True)) for p, n in rows]

    first = submit(rows[:6])
    engine.turn(3)
    engine.cancel(first[2])
    [long] = submit([([7] * 30, 90)])
    engine.turn(2)
    assert engine._capacity > 64
    rest = submit(rows[6:])
    engine.run()
    alone = generator.generate([p for p, _ in rows], max_new_tokens=[n for _, n in rows], tau=0.5, ignore_eos=True)
    for request, result in zip([*first, *rest], alone, strict=True):
        if request is not first[2]:
            assert (request.result.ids, request.result.forwards) == (result.ids, result.forwards)
    assert len(long.result.ids) == 90
    sums = engine.statistics
    assert sums.head_rows == sums.steps * LANES * 4
    assert 4 * sums.steps * LANES < sums.slots < 8 * sums.steps * LANES


def test_a_nan_request_does_not_poison_its_lane():
    model = nnx.clone(marked("tiny_mars").model)
    table = model.embed_table.embedding
    table[...] = table[...].at[40].set(np.nan)
    broken = Generator(
        dataclasses.replace(marked("tiny_mars"), model=model), strategy="block_diffusion", diffusion_block=4,
        prefill_chunk=16, lanes=LANES, forbidden=(MASK, PAD, 40),
    )  # fmt: skip
    prompts = [[5 + i % 7] * (1 + i % 11) for i in range(30)]
    engine, options = broken.engine(), {"max_new_tokens": 13, "tau": 0.9, "ignore_eos": True}
    requests = [engine.submit(broken.spec(p, **options)) for p in [*prompts[:9], [3, 40, 7], [40] * 9, *prompts[9:]]]
    engine.run()
    failed = [r for r in requests if r.error is not None]
    assert failed == requests[9:11]
    good = base("tiny_mars").with_strategy(strategy="block_diffusion", diffusion_block=4)
    expected = [r.ids for r in good.generate(prompts, **options)]
    answered = [r.result.ids for r in requests if r.error is None]
    assert all(40 in e or a == e for a, e in zip(answered, expected, strict=True))


def test_nothing_compiles_after_warm_up(compilations):
    generator, draw = of("tiny_mars", 4), random.Random(2)
    engine = generator.engine()
    engine.warm_up(longest=60)
    compilations.clear()
    for i in range(20):
        prompt = [draw.randrange(2, 64) for _ in range(draw.randrange(1, 30))]
        options = {"tau": (1.0, 0.9, np.float32(0.5))[i % 3], "temperature": (0, 0.8)[i % 2], "seed": i}
        engine.submit(generator.spec(prompt, max_new_tokens=draw.randrange(1, 60 - len(prompt)), **options))
        engine.turn(draw.randrange(1, 7))
    engine.run()
    assert not compilations


def test_a_step_leaves_the_types_it_found():
    runtime = of("tiny_mars", 4).runtime
    network, strategy, params, one = runtime.network, runtime.strategy, runtime.params, np.int32(1)
    controls = step.Controls(**_idle_rows(8), allowed=runtime.allowed, mask_id=runtime.mask_id)
    began = jax.eval_shape(lambda: step.start.__wrapped__(network, strategy, 8, 64))
    filled = jax.eval_shape(lambda s: step.prefill.__wrapped__(network, strategy, 16, params, s, one), began)
    after = jax.eval_shape(lambda s: step.advance.__wrapped__(network, strategy, params, controls, s, one, one), began)

    def types(state):
        return [(jax.tree_util.keystr(p), x.dtype, x.weak_type, x.shape) for p, x in jax.tree.leaves_with_path(state)]

    assert types(filled) == types(after) == types(began)


def test_what_is_refused_and_what_is_warned_of():
    with pytest.raises(ValueError, match="diffusion_block belongs to strategy block_diffusion, not to mars"):
        base("tiny_mars").with_strategy(strategy="mars", diffusion_block=4)
    with pytest.raises(ValueError, match="diffusion_block must be a positive integer, got 0"):
        of("tiny_mars", 0)
    with pytest.raises(ValueError, match="would feed 2050 slots"):
        of("tiny_mars", 1025)
    with pytest.raises(ValueError, match="verification='rejection' belongs to strategies that verify drafts"):
        of("tiny_mars", 4).spec([5], verification="rejection")
    trained = dataclasses.replace(
        marked("tiny_mars"), hf_config={"marsjax": {"block_size": 4, "objective": "block_diffusion"}}
    )
    generator = Generator(trained)  # what it was trained for
    assert (generator.runtime.strategy.name, generator.plan.pending) == ("block_diffusion", 4)
    with pytest.warns(UserWarning, match="blocks of 8 are not those of 4"):
        generator.with_strategy(strategy="block_diffusion", diffusion_block=8)
    unmasked = dataclasses.replace(trained, mask_id=None)
    assert Generator(unmasked).runtime.strategy.name == "ar"
    with pytest.raises(ValueError, match=r"'block_diffusion' needs a mask token and this model has none: .*use 'ar'"):
        Generator(unmasked, strategy="block_diffusion")


def test_picture(capsys):
    assert cli.main(["plan-slots", "block_diffusion", "--diffusion-block", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "block_diffusion: 4 slots (2 pending, 2 masks), up to 2 tokens a forward"
    assert "■ ■ · ·" in lines[3]
    assert "■ ■ ■ ■" in lines[5]
    assert [line.endswith("none needed") for line in lines[3:]] == [True, False, False, True]
