"""Texts, stop strings and streams: a script spells the answer, one byte a token."""

import pytest
from decoding_helpers import finish, script, script_batch

from marsjax.decoding.answer import Answer

IM_END = 256
TEXT = "one two, thrée 🙂 STOP not this"


def spell(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def batch(tokenizer, text=TEXT, ends=False, window=4, limit=None, **options):
    ids = tuple(spell(tokenizer, text)) + ((IM_END,) if ends else ())
    # Unsure of every fifth token, so that runs differ in length and cut characters and stop strings anywhere.
    sure = tuple(0.5 if i % 5 == 3 else 0.99 for i in range(len(ids)))
    scripted = script(ids, sure, prompt_length=3, vocab=258)
    return script_batch(
        scripted, window, tokenizer=tokenizer, ends=(IM_END,), tau=0.9, max_new_tokens=limit or len(ids), **options
    )


def test_text_and_end(bytes_tokenizer):
    [result] = finish(batch(bytes_tokenizer, ends=True, limit=200))
    assert result.text == TEXT
    assert result.ids == [*spell(bytes_tokenizer, TEXT), IM_END]
    assert (result.finish_reason, result.stop) == ("stop", IM_END)


@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("stop", ["STOP", " S", "🙂", ", thrée", "o", ["zzz", "TOP", "two"]])
def test_stop_strings_across_tokens_and_runs(bytes_tokenizer, window, stop):
    stops = [stop] if isinstance(stop, str) else stop
    [result] = finish(batch(bytes_tokenizer, window=window, stop=stop), 2)
    at, which = min((TEXT.find(s), s) for s in stops if s in TEXT)
    assert result.text == TEXT[:at]
    assert (result.finish_reason, result.stop) == ("stop", which)
    assert bytes_tokenizer.decode(result.ids) == result.text
    assert sum(result.chunks) == len(result.ids)


def test_a_stop_string_that_never_comes(bytes_tokenizer):
    [result] = finish(batch(bytes_tokenizer, stop=["thiss", "STOPP"], ends=True, limit=200))
    assert (result.text, result.stop) == (TEXT, IM_END)


def test_stop_string_on_the_last_allowed_token(bytes_tokenizer):
    ids = spell(bytes_tokenizer, "one two")
    [result] = finish(batch(bytes_tokenizer, stop="two", limit=len(ids)))
    assert (result.text, result.finish_reason) == ("one ", "stop")
    [result] = finish(batch(bytes_tokenizer, stop="two,", limit=len(ids)))
    assert (result.text, result.finish_reason) == ("one two", "length")


def test_the_prompt_triggers_nothing(bytes_tokenizer):
    prompt = bytes_tokenizer.decode([2] * 3)
    [result] = finish(batch(bytes_tokenizer, stop=prompt[-1] + "one", ends=True, limit=200))
    assert result.text == TEXT


def test_an_ended_row_does_not_hold_up_the_others(bytes_tokenizer):
    ids = tuple(spell(bytes_tokenizer, TEXT))
    scripted = script(ids, (0.99,) * len(ids), prompt_length=3, vocab=258)
    results = finish(
        script_batch(scripted, 4, rows=3, tokenizer=bytes_tokenizer, tau=0.9, stop="STOP", max_new_tokens=[3, 40, 7]), 1
    )
    assert [r.text for r in results] == ["one", TEXT[: TEXT.find("STOP")], "one two"]


def test_increments_join_to_the_text(bytes_tokenizer):
    running = batch(bytes_tokenizer, stop=["STOP", " not"], ends=True, limit=200)
    shown = ""
    while not running.over:
        shown += running.advance(1)[0]
        assert TEXT.startswith(shown)
        answer = running.requests[0].answer
        assert bytes_tokenizer.decode(answer.ids[: answer.final]).startswith(shown)
    assert shown == running.results()[0].text == TEXT[: TEXT.find("STOP")]


def test_cut_characters_become_replacement_characters(bytes_tokenizer):
    ids = spell(bytes_tokenizer, "a🙂")
    [result] = finish(batch(bytes_tokenizer, limit=None, text="a🙂"), 1)
    assert result.text == "a🙂"
    answer = Answer(bytes_tokenizer, (), ())
    assert answer.push(ids[:3], [1, 1, 2]) + answer.finish() == bytes_tokenizer.decode(ids[:3])
