"""Increments against full decoding, stop strings against a search character by character."""

import random
import unicodedata

import pytest
from tokenizers import decoders

from marsjax.text.mask_token import ensure_mask_token
from marsjax.text.streaming import Detokenizer, StopStrings

TEXTS = [
    "größe 漢字 🙂🙂 naïve",
    "the answer is 7.\n\n",
    "👩‍👩‍👧 e\u0301 \u00a0\u00ad x",
    "<|im_start|>a<tool call>b<|im_end|>",
]


def pieces(rng, items):
    """A random cut of a sequence into runs, empty ones among them."""
    at = 0
    while at < len(items):
        step = rng.randint(0, 4)
        yield items[at : at + step]
        at += step


@pytest.mark.parametrize("skip", [True, False])
def test_increments_join_to_the_full_decoding(tokenizer, skip):
    rng = random.Random(0)
    cases = [tokenizer(t)["input_ids"] for t in TEXTS]
    cases += [[rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 40))] for _ in range(200)]
    for ids in cases:
        for _ in range(3):
            stream = Detokenizer(tokenizer, skip_special_tokens=skip)
            text = "".join(stream.push(part) for part in pieces(rng, ids)) + stream.finish()
            assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_no_half_characters(tokenizer):
    """Token by token, every increment is a run of whole characters of the text."""
    split = 0
    for text in [*TEXTS[:3], "ऴ😀 ξένος"]:
        text = unicodedata.normalize("NFC", text)  # as the tokenizer does
        stream, shown = Detokenizer(tokenizer), ""
        for i in tokenizer(text)["input_ids"]:
            split += "�" in tokenizer.decode([i])
            shown += stream.push([i])
            assert text.startswith(shown)
        assert shown == text
        assert stream.finish() == ""
    assert split > 5  # characters did span tokens


def test_an_unfinished_character_shows_at_the_end_only(tokenizer):
    half = tokenizer("😀")["input_ids"][:-1]
    assert "�" in tokenizer.decode(half)
    stream = Detokenizer(tokenizer)
    assert stream.push(half) == ""
    assert stream.finish() == tokenizer.decode(half)


def test_cost_is_linear_and_unknown_ids_have_no_text(tokenizer):
    """Each id is looked at once, also in an endless run of bytes that form no character."""
    stream, looked = Detokenizer(tokenizer), []
    plain = stream._bytes_of
    stream._bytes_of = lambda i: looked.append(i) or plain(i)
    bad = tokenizer.convert_tokens_to_ids("¡")  # byte 0xA1 alone
    text = "".join(stream.push([bad]) for _ in range(500)) + stream.finish()
    assert text == "�" * 500
    assert len(looked) == 500
    assert Detokenizer(tokenizer).push([len(tokenizer) + 5]) == ""


def test_masks_have_no_text(tokenizer):
    mask = ensure_mask_token(tokenizer, type("Table", (), {"vocab_size": 400})).mask_id
    assert Detokenizer(tokenizer).push([mask]) == ""


def test_other_decoders_are_refused(tokenizer):
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    with pytest.raises(ValueError, match=r"decoder \['ByteFallback', 'Fuse'\]"):
        Detokenizer(tokenizer)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert Detokenizer(tokenizer).push(tokenizer("größe")["input_ids"]) == "größe"


def first_stop(text, stops):
    """Reading character by character, stop as soon as the text ends with a stop string; the longest counts."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    "stops", [["ab"], ["abc", "b"], ["aa"], ["aab", "ab"], ["abab", "bb"], ["c", "abca"], [], ["abcabc"]]
)
def test_stop_strings_whatever_the_pieces(stops):
    rng = random.Random(1)
    for _ in range(400):
        text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
        want, stop = first_stop(text, stops)
        search, shown = StopStrings(stops), ""
        for part in pieces(rng, text):
            shown += search.push(part)
            assert want.startswith(shown)  # nothing is ever shown that a stop takes back
        shown += search.finish()
        assert (shown, search.stopped) == (want, stop)


def test_only_possible_beginnings_are_held_back():
    search = StopStrings(["\nQ:", "END"])
    assert search.push("the answer\n") == "the answer"
    assert search.push("is") == "\nis"
    assert search.push(" EN") == " "
    assert search.push("DLESS") == ""
    assert search.stopped == "END"
    assert search.push("more") == ""
    assert search.finish() == ""


def test_one_string_is_one_stop():
    search = StopStrings("ab")
    assert search.push("a-b-ab-") == "a-b-"
    assert search.stopped == "ab"


@pytest.mark.parametrize("stops", ["", ["x", ""], [None], [3]])
def test_empty_and_odd_stops_are_refused(stops):
    with pytest.raises(ValueError, match="non-empty string"):
        StopStrings(stops)
