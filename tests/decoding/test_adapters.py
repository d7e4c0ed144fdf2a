"""Gated adapters with random numbers: what is no mask computes what it did without them, under every strategy."""

import contextlib
import dataclasses
import functools
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies_reference as reference
from adapters_helpers import MASKS, Adapted, adapted
from decoding_helpers import END, MASK, PAD
from flax import nnx
from strategies_helpers import LANES, base, check_types, ids, marked, prompts_of, quick_compilation

import marsjax.decoding.network
from marsjax.decoding import Generator, block, block_diffusion, network, plans, step
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.engine import _idle_rows
from marsjax.models import Decoder, ModelConfig
from marsjax.models.layers import Gate

STRATEGIES = {
    "comb": {"strategy": "comb", "k": 3, "sampler_candidates": 3},
    "chain": {"strategy": "chain", "k": 2, "sampler_candidates": 2},
    "static": {"strategy": "tree", "widths": (3, 2), "sampler_candidates": 4},
    "dynamic": {"strategy": "tree", "k": 2, "block_complexity": 18, "lookup": 2, "sampler_candidates": 6},
    "mars": {"strategy": "mars", "window": 4},
    "speculative": {"strategy": "speculative", "k": 3, "draft_window": 2, "window": 3},
    "block": {"strategy": "block", "cache_block": 6},
}
OTHER_FORMS = {
    "comb-whole": {"strategy": "comb", "k": 3, "sampler_candidates": 0},
    "comb-alone": {"strategy": "comb", "k": 3, "sampler": False},
    "comb-one-mask": {"strategy": "comb", "k": 3, "sampler": False},
}


@functools.cache
def generator(name):
    options = (STRATEGIES | OTHER_FORMS)[name]
    if name == "speculative":
        options = options | {"draft": adapted("tiny_mars", blur=True)}
    return _ar(masks=1 if name == "comb-one-mask" else MASKS).with_strategy(**options)


@functools.cache
def _ar(**config):
    return Generator(
        adapted("tiny_mars", **config), strategy="ar", prefill_chunk=16, lanes=LANES, forbidden=(MASK, PAD)
    )


# --- one forward -----------------------------------------------------------------------------------------------------

PLANS = {
    "ar": plans.ar(),
    "mars": plans.mars(4),
    "chain": plans.chain(3),
    "comb": plans.comb(3),
    "tree": plans.tree((3, 2)),
    "dynamic": plans.tree((2, 2), dynamic=True),
    "speculative": plans.speculative(2, 3),
}
LENGTH = 48
CURSOR = np.asarray([3, 9, 0, 17], np.int32)


class Fed:
    """A network that keeps what its forward gave."""

    short_steps = False

    def __init__(self, network):
        self._network = network

    def __getattr__(self, name):
        return getattr(self._network, name)

    def forward(self, params, tokens, positions, attend, cache, masks=None):
        self.hidden, self.slots = self._network.forward(params, tokens, positions, attend, cache, masks)
        self.masks = masks
        return self.hidden, self.slots


def state_of(net, strategy, pending, seed=0):
    """Four lanes with a random text and cache; `pending` [4] tokens of each have no keys yet."""
    draw = np.random.default_rng(seed)
    began = step.start.__wrapped__(net, strategy, 4, LENGTH)
    return dataclasses.replace(
        began,
        tokens=jnp.asarray(draw.integers(2, 60, (4, LENGTH)), jnp.int32),
        cursor=jnp.asarray(CURSOR),
        length=jnp.asarray(CURSOR + pending),
        done=jnp.zeros(4, bool),
        cache=jax.tree.map(lambda x: jnp.asarray(draw.standard_normal(x.shape, dtype=np.float32)), began.cache),
    )


def controls_of(net):
    rows = _idle_rows(4) | {"limit": np.full(4, LENGTH, np.int32), "halted": np.zeros(4, bool)}
    return step.Controls(**rows, allowed=jnp.ones(net.config.vocab_size, bool), mask_id=np.int32(MASK))


def forward(plan, model, for_cpu, jit=True):
    """(hidden [4, S, D], keys and values, logits [4, 1 + drafts, V] of the heads) of random texts and drafts."""
    net, params = network.split(model, for_cpu=for_cpu)
    state = state_of(net, step.Strategy(plan), np.minimum([1, 2, 1, 3], plan.pending).astype(np.int32))
    draw = np.random.default_rng(1)
    guesses = Drafts.of(
        jnp.asarray(draw.integers(2, 60, (4, plan.drafts)), jnp.int32),
        count=jnp.asarray([plan.drafts] * 3 + [plan.drafts // 2]),
        parents=jnp.broadcast_to(plan.head_parents, (4, plan.drafts)) if plan.dynamic else None,
    )
    sees = plan.sees_with(guesses.parents) if plan.dynamic else plan.sees

    def run(params, controls, state, guesses):
        pending, everyone = state.length - state.cursor, jnp.ones(4, bool)
        fed = step._forward(Fed(net), plan, params, controls, state, guesses, sees, None, pending, everyone)
        return fed[0], fed[1], net.unembed(params, fed[0][:, jnp.asarray(list(plan.heads))])

    return jax.tree.map(np.asarray, (jax.jit(run) if jit else run)(params, controls_of(net), state, guesses))


def same(some, others, where):
    """Whether rows [4, S] `where` of hidden [4, S, D], or of keys and values [4, K, S, h], are the same bits."""
    return all(
        np.array_equal(*(np.moveaxis(x, 2, 1)[where] if x.ndim == 4 else x[where] for x in pair))
        for pair in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    )


@functools.cache
def _alone(for_cpu):
    return forward(PLANS["ar"], adapted("tiny_mars").model, for_cpu)[2]


@pytest.mark.parametrize("for_cpu", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_tokens_and_drafts_are_those_of_the_base_bit_for_bit(name, for_cpu):
    plan = PLANS[name]
    hidden, slots, logits = forward(plan, marked("tiny_mars").model, for_cpu)
    hidden_, slots_, logits_ = forward(plan, adapted("tiny_mars").model, for_cpu)
    ordinary = np.broadcast_to(~plan.is_mask, (4, plan.size))
    assert same((hidden, slots), (hidden_, slots_), ordinary)
    assert np.array_equal(logits, logits_)
    assert not (hidden == hidden_).all(-1)[~ordinary].any()  # no mask is what it was
    if plan.masks:  # each mask as it is among other slots
        alone = _alone(for_cpu)
        one = [0, 2]  # lanes with one pending token
        assert np.abs(alone[one, 0] - logits_[one, 0]).max() < 1e-5
        assert np.array_equal(alone[one, 0].argmax(-1), logits_[one, 0].argmax(-1))


@pytest.mark.parametrize("name", ["mars", "comb"])
def test_without_compilation_too(name):
    some, others = (forward(PLANS[name], model("tiny_mars").model, True, jit=False) for model in (marked, adapted))
    assert same(some[:2], others[:2], np.broadcast_to(~PLANS[name].is_mask, (4, PLANS[name].size)))
    assert np.array_equal(some[2], others[2])


@pytest.mark.parametrize("for_cpu", [True, False])
@pytest.mark.parametrize("name", ["block", "block_diffusion"])
def test_in_blocks_masks_lie_where_the_text_ends(name, for_cpu):
    strategy = block.BlockCache(6, block.Carry(72)) if name == "block" else block_diffusion.BlockDiffusion(4)
    fed = []
    for model in (marked("tiny_mars").model, adapted("tiny_mars").model):
        net, params = network.split(model, for_cpu=for_cpu)
        # Block diffusion: the block before is pending in three lanes, and one of them has a hole in its text.
        pending = np.asarray([1, 5, 4, 4] if name == "block" else [5, 3, 6, 1], np.int32)
        state = state_of(net, strategy, pending)
        if name == "block_diffusion":
            state = dataclasses.replace(state, cursor=jnp.asarray([4, 8, 0, 16]))
            known = state.proposer.known.at[2, 3].set(True)
            state = dataclasses.replace(state, proposer=state.proposer._replace(known=known))

        def run(params, controls, state, net=net):
            keeping = Fed(net)
            strategy.step(keeping, step.Params(params, ()), controls, state)
            return keeping.hidden, keeping.slots, keeping.masks.open, keeping.masks.ranks

        fed.append(jax.tree.map(np.asarray, jax.jit(run)(params, controls_of(net), state)))
    some, others = fed
    is_mask, ranks = others[2:]
    if name == "block":
        assert is_mask.sum(1).tolist() == [5, 1, 2, 2]
        assert ranks[0].tolist() == [0, 0, 1, 2, 3, 4]
        assert same(some[:2], others[:2], ~is_mask)
        assert not (some[0] == others[0]).all(-1)[is_mask].any()
    else:  # inside a block tokens see masks, and are other than they were; those of the block before are not
        # Known of the blocks of lanes at lengths 8, 12, 6 and 18: nothing, nothing, two and the last, two.
        assert is_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 1, 1]]
        assert ranks[is_mask].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 1]
        before = np.broadcast_to(np.arange(8) < 4, (4, 8))
        assert same(some[:2], others[:2], before)
        assert not (some[0] == others[0]).all(-1)[:, 4:][is_mask].any()


def test_a_gate_that_is_open_for_a_draft_is_noticed(monkeypatch):
    good = forward(PLANS["comb"], marked("tiny_mars").model, True)
    monkeypatch.setattr(marsjax.decoding.network, "Gate", lambda length, count, open=None: Gate(length, count + 1))
    broken = forward(PLANS["comb"], adapted("tiny_mars").model, True)
    ordinary = np.broadcast_to(~PLANS["comb"].is_mask, (4, PLANS["comb"].size))
    assert not same(good[:2], broken[:2], ordinary)
    assert not np.array_equal(good[2], broken[2])


# --- answers ---------------------------------------------------------------------------------------------------------

SETTINGS = (
    {"max_new_tokens": [1 + i % 32 for i in range(32)]},
    {"max_new_tokens": 32, "temperature": [0.7, 1.5] * 16, "top_p": [1.0, 0.9, 0.8, 1.0] * 8, "seed": range(32)},
)


@pytest.fixture
def quickly():
    with quick_compilation():
        yield


@functools.cache
def answers_of_ar():
    """Of the base, without an adapter."""
    return [ids(base("tiny_mars").generate(prompts_of("tiny_mars", 32), **options)) for options in SETTINGS]


@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_the_base_s_ar_through_the_queue(name):
    """Greedily and coupled, four times as many requests as lanes."""
    runs = Counter()
    with contextlib.nullcontext() if name == "comb" else quick_compilation():
        for options, expected in zip(SETTINGS, answers_of_ar(), strict=True):
            results = generator(name).generate(prompts_of("tiny_mars", 32), **options)
            assert ids(results) == expected
            runs.update(size for r in results for size in r.chunks if size)
    deepest = {"mars": 0, "block": 0}.get(name, 2)  # at τ = 1 they accept none
    assert all(runs[size] > 4 for size in range(1, deepest + 2)), runs


def test_a_gate_that_is_always_open_is_noticed(monkeypatch, quickly):
    """What the test above would say."""
    monkeypatch.setattr(marsjax.decoding.network, "Gate", lambda length, count, open=None: Gate(length, length))
    # k = 4 is nobody else's, so that the broken program is nobody else's either.
    broken = _ar(masks=MASKS).with_strategy(strategy="comb", k=4)
    assert ids(broken.generate(prompts_of("tiny_mars", 32), **SETTINGS[1])) != answers_of_ar()[1]


def expected_of(name, prompt, *, limit, tau):
    options, how = (STRATEGIES | OTHER_FORMS)[name], {"limit": limit, "end": END, "tau": tau}
    masks = 1 if name == "comb-one-mask" else MASKS
    target = model_of(options.get("sampler_candidates"), masks)
    if name in ("mars", "speculative"):
        drafts = {"k": options.get("k", 0), "draft_window": options.get("draft_window", 1)}
        return reference.decode_speculative(target, draft_of(), prompt, window=options["window"], **drafts, **how)
    form = options["strategy"]
    if form == "tree":
        form = ("static", options["widths"]) if name == "static" else ("dynamic", 5)
    return reference.decode_masks(
        target, prompt, k=options.get("k", 2), form=form, lookup=options.get("lookup", 0), **how
    )


@functools.cache
def model_of(candidates, masks):
    return Adapted("tiny_mars", candidates=candidates, masks=masks)


@functools.cache
def draft_of():
    return Adapted("tiny_mars", blur=True)


@pytest.mark.parametrize("name", [name for name in STRATEGIES | OTHER_FORMS if name != "block"])
def test_equals_decoding_without_a_cache(name, quickly):
    """Tokens, forwards and accepted counts; of the mixture with τ too."""
    prompts, draw = prompts_of("tiny_mars", 16, seed=3), random.Random(4)
    limits = [draw.randrange(1, 33) for _ in prompts]
    taus = [draw.choice((1.0, 0.9, 0.5)) for _ in prompts]
    results = generator(name).generate(prompts, max_new_tokens=limits, tau=taus)
    for prompt, limit, tau, result in zip(prompts, limits, taus, results, strict=True):
        assert (result.ids, result.chunks) == expected_of(name, prompt, limit=limit, tau=tau), (prompt, limit, tau)


def test_rejection_draws_from_the_base(quickly):
    """Three tokens of many seeds against the base's, coupled: two samples of one distribution."""
    prompt, draws = [50, 9, 4, 20, 51, 30], 2048
    options = {"max_new_tokens": 3, "temperature": 4.0, "top_k": 3, "ignore_eos": True}
    comb = generator("comb").generate([prompt] * draws, seed=range(draws), verification="rejection", **options)
    ar = base("tiny_mars").generate([prompt] * draws, seed=range(draws, 2 * draws), **options)
    some, others = (Counter(tuple(r.ids) for r in results) for results in (comb, ar))
    cells = [c for c in some | others if some[c] + others[c] >= 20]
    statistic = sum((some[c] - others[c]) ** 2 / (some[c] + others[c]) for c in cells)
    assert len(cells) > 9
    assert statistic < len(cells) + 5 * np.sqrt(2 * len(cells))
    assert sum(r.forwards for r in comb) < sum(r.forwards for r in ar) - 100


# --- what is asked ---------------------------------------------------------------------------------------------------


def of(loaded, **options):
    return Generator(loaded, forbidden=(MASK, PAD), lanes=LANES, **options)


def trained(objective, block_size, **config):
    loaded = adapted("tiny_mars", **config)
    known = {"marsjax": {"objective": objective, "block_size": block_size}}
    return dataclasses.replace(loaded, hf_config=loaded.hf_config | known)


@pytest.mark.parametrize(
    ("objective", "block_size", "masks", "name", "asks"),
    [("mtp", 3, 5, "comb", 3), (None, None, 5, "comb", 5), ("mars", 4, 1, "mars", 3), (None, None, 1, "mars", 3)],
)
def test_auto_is_what_the_adapter_was_trained_for(objective, block_size, masks, name, asks):
    plan = of(trained(objective, block_size, masks=masks, sampler=False)).plan
    assert (plan.name, plan.asks) == (name, asks)


def test_an_adapter_without_masks_needs_a_mask_token():
    loaded = adapted("tiny_mars", masks=0, sampler=False)
    assert of(loaded).plan.name == "mars"
    plain = dataclasses.replace(loaded, mask_id=None)
    assert of(plain).plan.name == "ar"
    with pytest.raises(ValueError, match="'comb' needs a mask token and this model has none"):
        of(plain, strategy="comb")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "comb", "k": 6}, r"k asks 6 masks in a row, .* has embeddings for 5; lower k, or .*\(probe\)"),
        ({"strategy": "chain", "k": 6}, "k asks 6 masks"),
        ({"strategy": "tree", "widths": (1,) * 6}, "widths asks 6 masks"),
        ({"strategy": "mars", "window": 7}, "window asks 6 masks in a row, .* embeddings for 5; lower window$"),
        ({"strategy": "block", "cache_block": 7}, "cache_block asks 6 masks"),
        ({"strategy": "block_diffusion", "diffusion_block": 6}, "diffusion_block asks 6 masks"),
        ({"strategy": "block_diffusion", "diffusion_block": 4}, "beside a gated adapter has never learned"),
        ({"strategy": "mars", "sampler": True}, "sampler belongs to strategy chain or comb or tree, not to mars"),
        ({"strategy": "comb", "sampler": 1}, "sampler must be true or false, got 1"),
        ({"strategy": "comb", "sampler_candidates": -1}, "sampler_candidates must be a positive integer"),
        ({"strategy": "comb", "sampler_candidates": False}, "sampler_candidates must be a positive integer"),
        ({"strategy": "comb", "sampler": False, "sampler_candidates": 4}, "which sampler=False leaves out"),
    ],
)
def test_what_cannot_be_asked(options, reason):
    with pytest.raises(ValueError, match=reason):
        _ar(masks=MASKS).with_strategy(**options)


def test_as_many_masks_as_there_are():
    for options in (
        {"strategy": "comb", "k": 5},
        {"strategy": "mars", "window": 6},
        {"strategy": "comb", "k": 8, "probe": "zero"},
    ):
        _ar(masks=MASKS).with_strategy(**options)
    one = _ar(masks=1)  # stands for all
    assert one.with_strategy(strategy="comb", k=8).plan.asks == 8


def test_a_draft_model_s_masks():
    draft = adapted("tiny_mars", blur=True)
    base("tiny_mars").with_strategy(strategy="speculative", k=8, draft_window=6, draft=draft)
    with pytest.raises(ValueError, match=r"draft_window=7 asks 6 masks in a row, .* draft model's .* for 5"):
        base("tiny_mars").with_strategy(strategy="speculative", k=8, draft_window=7, draft=draft)


def test_a_sampler_head_must_be_there():
    plain = of(adapted("tiny_mars", sampler=False), strategy="ar")
    for options in ({"sampler": True}, {"sampler_candidates": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} needs a model with a sampler head"):
            plain.with_strategy(strategy="comb", k=2, **options)
    plain.with_strategy(strategy="comb", k=2, sampler=False)


@pytest.mark.parametrize("name", STRATEGIES | OTHER_FORMS)
def test_a_step_leaves_the_types_it_found(name):
    check_types(generator(name).runtime)


def test_how_many_candidates_by_default():
    def candidates(**options):
        return _ar(masks=MASKS).with_strategy(strategy="comb", k=2, **options).runtime.strategy.proposer.sampler

    assert candidates().candidates == 64
    assert candidates(sampler_candidates=0).candidates is None
    assert candidates(sampler_candidates=72).candidates is None  # all of them
    assert candidates(sampler=False) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("for_cpu", [True, False])
def test_logits_of_some_ids_are_those_of_all(tied, for_cpu):
    config = ModelConfig("llama", 70, 16, 24, 1, 2, 1, 8, tie_embeddings=tied)
    net, params = network.split(Decoder(config, rngs=nnx.Rngs(0)), for_cpu=for_cpu)
    draw = np.random.default_rng(0)
    hidden = jnp.asarray(draw.standard_normal((3, 16), dtype=np.float32))
    chosen = jnp.asarray(draw.integers(0, 70, (3, 9)))
    everything = net.unembed(params, hidden[:, None])[:, 0]
    some = net.unembed_some(params, hidden, chosen)
    np.testing.assert_allclose(some, jnp.take_along_axis(everything, chosen, 1), rtol=1e-5, atol=1e-6)
