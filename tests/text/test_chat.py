import pytest

from marsjax.text.chat import (
    PLAIN_CHAT_TEMPLATE,
    ChatTemplateError,
    check_messages,
    encode,
    render_prompt,
    turn_end_id,
)

USER = {"role": "user", "content": "what is the sum?\n\n"}
ANSWER = {"role": "assistant", "content": "the sum is 7."}


def test_prompt_is_what_transformers_sends(tokenizer):
    for messages in ([USER], [USER, ANSWER, USER], [{"role": "system", "content": "the end"}, USER]):
        sent = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        assert render_prompt(tokenizer, messages) == sent["input_ids"]


def test_system_prompt_replaces_the_templates_own(tokenizer):
    assert "Be helpful." in tokenizer.decode(render_prompt(tokenizer, [USER]))
    text = tokenizer.decode(render_prompt(tokenizer, [{"role": "system", "content": "Be short."}, USER]))
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")


def test_encode_neither_adds_nor_cuts(tokenizer):
    text = "the answer is 漢字 <|endoftext|> " * 20
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode(tokenizer, text) == plain
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert encode(tokenizer, text) == plain


def test_missing_template_says_the_way_out(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match=r"no chat template.*PLAIN_CHAT_TEMPLATE"):
        render_prompt(tokenizer, [USER])
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    text = "<|im_start|>user\nwhat is the sum?\n\n<|im_end|>\n<|im_start|>assistant\n"
    assert render_prompt(tokenizer, [USER]) == tokenizer(text)["input_ids"]


def test_a_template_that_refuses_is_quoted(tokenizer):
    with pytest.raises(ChatTemplateError, match=r"roles \[user, tool\]: unknown role tool"):
        render_prompt(tokenizer, [USER, {"role": "tool", "content": "7"}])
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(ChatTemplateError, match="refuses"):
        render_prompt(tokenizer, [USER])
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(ChatTemplateError, match="refuses"):
        render_prompt(tokenizer, [USER])


def test_template_arguments(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '!' if loud else '.' }}"
    loud = render_prompt(tokenizer, [{"role": "user", "content": "the end"}], loud=True)
    assert tokenizer.decode(loud) == "the end!"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        (["hi"], "message 0 is str"),
        ([USER, {"role": "assistant"}], "message 1: 'content' must be a string, but is missing"),
        ([{"role": 3, "content": "x"}], "message 0: 'role' must be a string, but is int"),
    ],
)
def test_bad_messages(tokenizer, messages, message):
    with pytest.raises(ValueError, match=message):
        check_messages(messages)
    with pytest.raises(ValueError, match=message):
        render_prompt(tokenizer, messages)


def test_turn_end_is_the_templates_token_not_the_tokenizers(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end_id(tokenizer) == end
    tokenizer.eos_token = "<|endoftext|>"  # a base model with a ChatML template
    assert turn_end_id(tokenizer) == end
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    assert turn_end_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.eos_token = None
    with pytest.raises(ChatTemplateError, match="no eos_token"):
        turn_end_id(tokenizer)
