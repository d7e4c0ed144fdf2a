"""The length policy: what is cut, what is dropped, and that both are counted."""

import numpy as np
import pytest

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.rows import LONG_PROMPT, MASK_IN_TEXT, NO_ANSWER, RowMaker, RowStats
from marsjax.text.chat import encode, render_prompt

TOKENIZER = demo_tokenizer()
END = TOKENIZER.eos_token_id


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def make(messages, length, **options):
    stats = RowStats()
    return RowMaker(TOKENIZER, length, END, **options)(messages, stats), stats


def test_every_limit():
    """For every limit, against the uncut row: prefix kept, end token only if it fits, drops and cuts counted."""
    messages = [user("What is 3 + 4?"), assistant("The sum of 3 and 4 is 7.")]
    prompt = render_prompt(TOKENIZER, messages[:1])
    whole = prompt + encode(TOKENIZER, messages[1]["content"]) + [END]
    for length in range(1, len(whole) + 4):
        rows, stats = make(messages, length)
        if length <= len(prompt):
            assert not rows
            assert stats.dropped == {LONG_PROMPT: 1}
            continue
        (row,) = rows
        assert row.ids.tolist() == whole[:length]
        assert row.supervised.tolist() == [i >= len(prompt) for i in range(len(row.ids))]
        assert row.complete == (length >= len(whole)) == (row.ids[-1] == END)
        assert (stats.cut, stats.rows, stats.tokens) == (not row.complete, 1, len(row.ids))
        assert stats.supervised_tokens == len(row.ids) - len(prompt)


def test_cut_inside_a_later_prompt_ends_behind_the_answer():
    messages = [user("Hi"), assistant("Yes."), user("And a much longer question?"), assistant("No.")]
    first = len(render_prompt(TOKENIZER, messages[:1])) + len(encode(TOKENIZER, "Yes.")) + 1
    second = len(render_prompt(TOKENIZER, messages[:3]))
    for length in range(first, second + 1):
        (row,), stats = make(messages, length)
        assert len(row.ids) == first
        assert row.complete
        assert row.ids[-1] == END
        assert stats.cut == 0
    (row,), stats = make(messages, second + 1)
    assert len(row.ids) == second + 1
    assert not row.complete


def test_conversations_without_answers_are_counted():
    for messages in ([user("Hi")], [assistant("Hello")], [user("Hi"), assistant("")]):
        rows, stats = make(messages, 64)
        assert not rows
        assert stats.dropped == {NO_ANSWER: 1}
    assert "1 dropped: no assistant answer" in str(stats)


def test_rows_with_the_mask_token_as_text_are_dropped():
    tokenizer = demo_tokenizer()
    tokenizer.add_tokens(["<|mask|>"], special_tokens=True)
    stats = RowStats()
    maker = RowMaker(tokenizer, 64, END, mask_id=640)
    assert not maker([user("Write <|mask|>"), assistant("It is <|mask|>.")], stats)
    assert stats.dropped == {MASK_IN_TEXT: 1}
    assert len(maker([user("Write it"), assistant("It.")], stats)) == 1


def test_pad_token_in_a_message_is_an_ordinary_token():
    (row,), _ = make([user("What is <|endoftext|>?"), assistant("<|endoftext|> is a token.")], 64)
    pad = TOKENIZER.pad_token_id
    assert (row.ids == pad).sum() == 2
    assert row.supervised[np.flatnonzero(row.ids == pad)[1]]


def test_template_arguments_arrive():
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{{ shout | default('') }}{{ messages[0]['content'] }}:"
    maker = RowMaker(tokenizer, 64, END, template_kwargs={"shout": "Hey "})
    (row,) = maker([user("A"), assistant("B")])
    assert tokenizer.decode(row.ids[~row.supervised]) == "Hey A:"


def test_bad_messages_are_named():
    with pytest.raises(ValueError, match="message 1: 'content' must be a string, but is NoneType"):
        make([user("Hi"), {"role": "assistant", "content": None}], 64)
