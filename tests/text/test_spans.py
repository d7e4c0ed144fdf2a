"""Supervised spans against their definition: prompt as inference sends it, then the answer, then the end."""

import random

from marsjax.text.chat import encode, render_prompt
from marsjax.text.spans import supervised_spans


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def check(tokenizer, messages, end):
    """Each answer stands once behind its prompt, supervised with its end; nothing else is supervised."""
    rows = supervised_spans(tokenizer, messages, end)
    supervised = 0
    for turn, message in enumerate(messages):
        if turn == 0 or message["role"] != "assistant" or not message["content"]:
            continue
        prompt = render_prompt(tokenizer, messages[:turn])
        whole = prompt + encode(tokenizer, message["content"]) + [end]
        (row,) = [r for r in rows if r.ids[: len(whole)] == whole and all(r.supervised[len(prompt) : len(whole)])]
        assert not row.supervised[len(prompt) - 1]
        supervised += len(whole) - len(prompt)
    assert sum(sum(row.supervised) for row in rows) == supervised
    assert all(len(row.ids) == len(row.supervised) for row in rows)
    return rows


def test_single_turn(tokenizer):
    end = tokenizer.eos_token_id
    (row,) = check(tokenizer, [user("what is the sum?"), assistant("the sum is 7.")], end)
    assert row.ids[-1] == end
    answer = [i for i, s in zip(row.ids, row.supervised, strict=True) if s]
    assert tokenizer.decode(answer) == "the sum is 7.<|im_end|>"


def test_no_merge_across_the_boundary(tokenizer):
    """'assistant\\n' + '\\nthe' would be one token '\\n\\n' in a joint encoding."""
    messages = [user("what?"), assistant("\nthe end")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    (row,) = check(tokenizer, messages, tokenizer.eos_token_id)
    assert encode(tokenizer, text)[: len(row.ids)] != row.ids  # the case is a real one
    assert tokenizer.decode(row.ids) + "\n" == text


def test_answer_that_occurs_in_the_question(tokenizer):
    (row,) = check(tokenizer, [user("say yes or yes: yes"), assistant("yes")], tokenizer.eos_token_id)
    assert sum(row.supervised) == len(encode(tokenizer, "yes")) + 1
    assert row.supervised == sorted(row.supervised)


def test_several_turns_in_one_row(tokenizer):
    messages = [user("the sum?"), assistant("7."), user("and 3?"), assistant("the answer is no"), user("the end")]
    (row,) = check(tokenizer, messages, tokenizer.eos_token_id)
    assert tokenizer.decode(row.ids) + "\n" == tokenizer.apply_chat_template(messages[:4], tokenize=False)
    assert sum(i == tokenizer.eos_token_id and s for i, s in zip(row.ids, row.supervised, strict=True)) == 2


def test_a_template_that_rewrites_earlier_answers_gives_a_row_each(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    messages = [user("the sum?"), assistant("7 "), user("and 3?"), assistant("no"), user("so"), assistant("yes")]
    rows = check(tokenizer, messages, tokenizer.eos_token_id)
    assert len(rows) == 2
    answers = [tokenizer.decode([i for i, s in zip(r.ids, r.supervised, strict=True) if s]) for r in rows]
    assert answers == ["7 <|im_end|>", "no<|im_end|>yes<|im_end|>"]


def test_merge_in_a_later_prompt_gives_a_row_each(tokenizer):
    messages = [user("what?"), assistant("\nthe end"), user("so?"), assistant("yes")]
    assert len(check(tokenizer, messages, tokenizer.eos_token_id)) == 2


def test_turns_without_text_or_prompt_are_context(tokenizer):
    end = tokenizer.eos_token_id
    assert check(tokenizer, [user("what?")], end) == []
    assert check(tokenizer, [assistant("the end")], end) == []
    assert check(tokenizer, [user("what?"), assistant("")], end) == []
    (row,) = check(tokenizer, [assistant("the end"), user("so?"), assistant("yes")], end)
    assert tokenizer.decode([i for i, s in zip(row.ids, row.supervised, strict=True) if s]) == "yes<|im_end|>"


def test_random_conversations(tokenizer):
    rng = random.Random(0)
    words = ["the", " end", "\n", "\n\n", "7", " 漢字", "yes", "<|endoftext|>", "<|im_end|>", " ", "assistant"]
    for _ in range(60):
        messages = [
            {"role": rng.choice(["user", "assistant"]), "content": "".join(rng.choices(words, k=rng.randint(0, 5)))}
            for _ in range(rng.randint(1, 6))
        ]
        check_once_each(tokenizer, messages)


def check_once_each(tokenizer, messages):
    end = tokenizer.eos_token_id
    rows = supervised_spans(tokenizer, messages, end)
    want = sum(
        len(encode(tokenizer, m["content"])) + 1
        for i, m in enumerate(messages)
        if i and m["role"] == "assistant" and m["content"]
    )
    assert sum(sum(r.supervised) for r in rows) == want
    prompts = [
        render_prompt(tokenizer, messages[:k]) for k in range(1, len(messages)) if messages[k]["role"] == "assistant"
    ]
    for row in rows:
        starts = [i for i, s in enumerate(row.supervised) if s and not row.supervised[i - 1]]
        assert all(row.ids[:start] in prompts for start in starts)
