"""Options, limits, compiled programs, and that nothing a user holds is taken away."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import CASES, END, MASK, PAD, ROWS, generator, pretrained

import marsjax.weights
from marsjax.decoding import Generator
from marsjax.decoding.engine import cache_length
from marsjax.decoding.network import split
from marsjax.decoding.requests import prompt_ids, split_batch
from marsjax.decoding.step import advance

PROMPT = [50, 9, 7, 22, 51]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tau": 1.5}, "tau=1.5 is out of range.*at most 1"),
        ({"tau": 0.0}, "tau=0 is out of range"),
        ({"tau": -0.1, "measure": "margin"}, "tau=-0.1"),
        ({"tau": -1, "measure": "entropy"}, "at least 0"),
        ({"tau": float("nan")}, "tau must be a finite number"),
        ({"tau": "high"}, "tau must be a finite number, got 'high'"),
        ({"tau": [0.9, 0.9]}, "tau has 2 entries for 1 prompts"),
        ({"measure": "surprise"}, "probability, margin, entropy"),
        ({"max_new_tokens": 0}, "max_new_tokens must be .* at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"temperature": 1e-7}, "in 1e-06..1e\\+06, got 1e-07"),
        ({"temperature": 1e39}, "in 1e-06..1e\\+06, got 1e\\+39"),
        ({"max_new_tokens": 2**63 - 1}, "shorten the prompt or the limit"),
        ({"max_new_tokens": 2**70}, "shorten the prompt or the limit"),
        ({"max_new_tokens": 2**70}, f"with max_new_tokens={2**70} that makes {2**70 + 5}, but the model has 512"),
        ({"top_k": -2}, "top_k must be an integer of at least 0 .0, like -1, keeps .* got -2"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 1.1}, "top_p must be in 0..1"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "below 2\\^32"),
        ({"stop_ids": [72]}, "stop_ids must be token ids in 0..71"),
        ({"stop_ids": 5}, "stop_ids must be a list of token ids, got 5"),
        ({"stop_ids": np.asarray(5)}, "stop_ids must be a list of token ids, got 5"),
        ({"stop_ids": {5: 1}}, "stop_ids must be a list of token ids, got {5: 1}"),
        ({"stop_ids": b"a"}, "stop_ids must be a list of token ids, got b'a'"),
        ({"stop": "x"}, "need a tokenizer"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop": 0}, "stop must be a string or a list of strings, got 0"),
        ({"stop": {"a": 1}}, "stop must be a string or a list of strings, got {'a': 1}"),
        ({"stop": [5]}, "stop must be strings of at least one character, got 5"),
        ({"max_new_tokens": 508}, "5 tokens; with max_new_tokens=508 that makes 513, but the model has 512"),
    ],
    ids=str,
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        generator().generate(PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        (b"abc", TypeError, "got bytes"),
        ([b"abc"], TypeError, "got bytes"),
        (bytearray(b"abc"), TypeError, "got bytearray"),
        ([[]], ValueError, "empty"),
        ([1, 72], ValueError, "token id 72 at entry 1 .* 0..71"),
        ([-1], ValueError, "token id -1"),
        ([1, 2.0], TypeError, "entry 1 of the prompt is 2.0"),
        ([1.5], TypeError, "must be integers"),
        (np.asarray([1.0, 2.0]), TypeError, "must be integers"),
        ([True], TypeError, "must be integers"),
        ("text", ValueError, "no tokenizer"),
        ([{"role": "user", "content": "hi"}], ValueError, "no tokenizer"),
        (3, TypeError, "int"),
    ],
    ids=str,
)
def test_bad_prompts(prompt, error, words):
    with pytest.raises(error, match=words):
        generator().generate(prompt)


@pytest.mark.parametrize("name", ["max_new_tokens", "seed", "temperature", "stop_ids"])
def test_numbers_that_python_does_not_write_out(name):
    value = 10**5000
    with pytest.raises(ValueError, match=f"{name}.*a number of over 4,300 digits"):
        generator().generate(PROMPT, **{name: [value]})
    with pytest.raises(ValueError, match=r"token id a number of over 4,300 digits at entry 0"):
        generator().generate([value])


def test_a_list_of_no_prompts():
    assert split_batch([]) == split_batch(np.zeros((0, 5), int)) == ([], False)


def test_options_that_say_nothing():
    plain = generator().generate(PROMPT, max_new_tokens=4, temperature=1.0, seed=5)
    for options in ({"stop_ids": None, "stop": None}, {"top_k": -1}, {"top_k": np.int64(0)}, {"stop_ids": np.zeros(0)}):
        assert generator().generate(PROMPT, max_new_tokens=4, temperature=1.0, seed=5, **options).ids == plain.ids


def test_unknown_option_names():
    with pytest.raises(TypeError, match="thresold"):
        generator().generate(PROMPT, thresold=0.5)
    with pytest.raises(TypeError, match="thresold"):
        generator().stream(PROMPT, thresold=0.5)


def test_bad_generators():
    with pytest.raises(ValueError, match="window belongs to strategy mars or speculative, not to ar"):
        Generator(pretrained("tiny_mars"), strategy="ar", window=4)
    with pytest.raises(ValueError, match="k belongs to strategy chain or comb"):
        Generator(pretrained("tiny_mars"), strategy="mars", mask_id=MASK, k=4)
    with pytest.raises(ValueError, match="needs a mask token"):
        Generator(pretrained("tiny_mars"), strategy="mars")
    with pytest.raises(ValueError, match=r"chain, comb, tree, .*got 'fast'"):
        Generator(pretrained("tiny_mars"), strategy="fast")
    with pytest.raises(ValueError, match=r"mask_id 99 .* 72"):
        Generator(pretrained("tiny_mars"), mask_id=99)
    with pytest.raises(ValueError, match="window must be a positive integer, got 0"):
        Generator(pretrained("tiny_mars"), mask_id=MASK, window=0)
    with pytest.raises(ValueError, match="no meaning with strategy 'ar'"):
        generator(strategy="ar").generate(PROMPT, tau=0.9)
    with pytest.warns(UserWarning, match="window 8 is beyond the block size 4"):
        Generator(pretrained("tiny_mars"), mask_id=MASK, window=8, block_size=4)


def test_strategy_auto_and_the_trained_window():
    assert Generator(pretrained("tiny_mars")).plan.name == "ar"
    assert Generator(pretrained("tiny_mars"), mask_id=MASK).plan.window == 4
    trained = dataclasses.replace(pretrained("tiny_mars"), mask_id=MASK, hf_config={"marsjax": {"block_size": 6}})
    assert Generator(trained).plan.window == 6


def test_batches_of_any_form():
    alone = generator().generate(PROMPT, max_new_tokens=4)
    batches = ([PROMPT], np.asarray([PROMPT]), [np.asarray(PROMPT)], (tuple(PROMPT),))
    for batch in batches:
        assert [r.ids for r in generator().generate(batch, max_new_tokens=4)] == [alone.ids]
    assert alone.prompt_ids == PROMPT


def test_texts_become_what_the_chat_template_makes_of_them(bytes_tokenizer):
    text = "hi"
    plain = bytes_tokenizer(text)["input_ids"]
    assert prompt_ids(text, bytes_tokenizer, 258, raw=False) == plain
    bytes_tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    try:
        rendered = bytes_tokenizer.encode("<user>hi", add_special_tokens=False)
        assert prompt_ids(text, bytes_tokenizer, 258, raw=False) == rendered
        assert prompt_ids([{"role": "user", "content": text}], bytes_tokenizer, 258, raw=False) == rendered
        assert prompt_ids(text, bytes_tokenizer, 258, raw=True) == plain
        with pytest.raises(ValueError, match="empty: a text needs at least one character"):
            prompt_ids("", bytes_tokenizer, 258, raw=False)
        with pytest.raises(ValueError, match="not messages"):
            prompt_ids([{"role": "user", "content": text}], bytes_tokenizer, 258, raw=True)
    finally:
        bytes_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="empty"):
        prompt_ids("", bytes_tokenizer, 258, raw=True)
    for raw in (True, False):
        with pytest.raises(ValueError, match=r"half a surrogate pair, '\\ud800' at 1: no character"):
            prompt_ids("a\ud800", bytes_tokenizer, 258, raw=raw)


def test_result_is_json():
    result = generator().generate(PROMPT, tau=np.float32(0.9), seed=np.uint32(3), max_new_tokens=np.int64(6))
    read = json.loads(json.dumps(result.to_dict()))
    assert read["ids"] == result.ids
    assert read["tokens_per_forward"] == len(result.ids) / result.forwards
    assert read["seed"] == 3
    assert read["seconds"] > 0


def test_drawn_seeds_are_reported_and_repeat():
    first = generator().generate([PROMPT] * ROWS, temperature=3.0, max_new_tokens=8)
    assert len({tuple(r.ids) for r in first}) > 1
    again = generator().generate([PROMPT] * ROWS, temperature=3.0, max_new_tokens=8, seed=[r.seed for r in first])
    assert [r.ids for r in again] == [r.ids for r in first]


def test_masks_and_padding_are_never_emitted():
    results = generator("tiny_random").generate(
        [PROMPT] * ROWS, tau=0.01, temperature=1e4, max_new_tokens=40, ignore_eos=True, seed=list(range(ROWS))
    )
    drawn = {i for r in results for i in r.ids}
    assert len(drawn) > 60
    assert not drawn & {MASK, PAD}


def test_an_end_token_that_pads_is_still_emitted():
    assert Generator(pretrained("tiny_mars"), pad_id=END).runtime.allowed[END]


def test_nothing_compiles_after_the_first_call(compilations):
    run = generator().generate
    run([PROMPT] * ROWS, max_new_tokens=8, seed=0)
    compilations.clear()
    for n in range(1, 45):  # bucket of 64, up to its edge
        prompt = [50] * n
        run([prompt] * ROWS, tau=(1.0, 0.95, np.float32(0.9), 1)[n % 4], max_new_tokens=[61 - n] * ROWS, seed=n)
    run = functools.partial(run, max_new_tokens=8)
    run([PROMPT] * ROWS, measure="entropy", tau=2)
    run([PROMPT] * ROWS, measure=["margin", "probability"] * (ROWS // 2), tau=[0.5] * ROWS, temperature=0.3)
    run([PROMPT] * ROWS, temperature=np.float32(1), top_k=3, top_p=0.5, seed=np.int64(9), stop_ids=[4, 5, 6])
    run([PROMPT] * ROWS, temperature=1, top_k=10**12, ignore_eos=True, max_new_tokens=3)
    assert not compilations
    jax.jit(lambda x: x + 1)(np.float32(len(PROMPT)))
    assert compilations  # so the listener does hear them


def test_four_programs_and_a_cache_updated_in_place(compilations):
    rows, length = 3, 64
    engine = generator().engine(rows)
    for _ in range(rows):
        engine.submit(generator().spec(PROMPT, max_new_tokens=8))
    engine.turn(1)
    assert len(compilations) == 4  # start, admit, prefill, advance
    runtime = generator().runtime
    arguments = runtime.params, engine._controls, engine._state, np.int32(0), np.int32(1)
    program = advance.lower(runtime.network, runtime.strategy, *arguments).compile()
    config = generator().config
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    assert engine._state.cache[0].k.shape == shape
    text = program.as_text()
    assert "dynamic-update-slice" in text
    assert not re.findall(rf"f32\[{','.join(map(str, shape))}\]\S* copy\(", text)
    assert program.memory_analysis().alias_size_in_bytes >= 2 * config.num_layers * 4 * np.prod(shape)


def test_nothing_a_user_holds_is_donated():
    model = pretrained("tiny_mars").model
    before = jax.tree.map(np.array, jax.tree.leaves(model))
    prompt, tau = np.asarray(PROMPT), np.asarray([0.9], np.float32)
    for _ in range(2):
        generator().generate([prompt], tau=tau, max_new_tokens=9)
    assert prompt.tolist() == PROMPT
    assert tau.tolist() == [np.float32(0.9)]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model), before)


def test_cache_lengths():
    assert [cache_length(n, 16)[0] for n in (1, 64, 65, 96, 97, 129, 200, 257)] == [64, 64, 96, 96, 128, 192, 256, 384]
    assert [cache_length(n, 32) for n in (1, 65, 97, 1000)] == [(64, 16), (96, 24), (128, 32), (1024, 32)]
    assert cache_length(65, 20) == (100, 20)
    for needed in range(1, 3000, 7):
        length, chunk = cache_length(needed, 64)
        assert needed <= length <= max(128, 1.5 * needed + 64)
        assert length % chunk == 0


def test_nan_weights_are_told_not_decoded():
    broken = marsjax.weights.load(CASES / "tiny_mars")  # its own: the others share one
    scale = broken.model.final_norm.scale
    scale[...] = jnp.full_like(scale[...], jnp.nan)
    lm = Generator(broken, window=4)
    for prompts, options in (
        ([50, 9, 7], {}),
        ([[50, 9, 7], [50, 9]], {}),
        ([[50, 9, 7], [50, 9]], {"temperature": 1.0}),
    ):
        with pytest.raises(FloatingPointError, match="logits are NaN"):
            lm.generate(prompts, max_new_tokens=4, **options)


def test_bfloat16_logits_are_float32():
    model = pretrained("tiny_mars").model
    network, params = split(model, jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(0), (1, 4, model.config.hidden_size), jnp.bfloat16)
    logits = network.unembed(params, hidden)
    assert logits.dtype == jnp.float32
    assert not jnp.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
