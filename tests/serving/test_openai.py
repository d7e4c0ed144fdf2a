"""Bodies of OpenAI's API → prompt and options, refused by the body's own names."""

import pytest

from marsjax.serving import openai
from marsjax.serving.openai import CHAT, COMPLETIONS

TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("url", "body", "prompt"),
    [
        (COMPLETIONS, {"prompt": "abc"}, "abc"),
        (COMPLETIONS, {"prompt": ["abc"]}, "abc"),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, [1, 2, 3]),
        (COMPLETIONS, {"prompt": [[1, 2, 3]]}, [1, 2, 3]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [TEXT, {"type": "text", "text": " b"}]}]},
            [{"role": "user", "content": "a b"}],
        ),
    ],
    ids=str,
)
def test_prompts(url, body, prompt):
    neutral = {"model": "m", "tool_choice": "none", "parallel_tool_calls": True, "tools": [], "temperature": None}
    assert openai.request(url, body | neutral) == (prompt, {"raw": url == COMPLETIONS})


def test_options_by_their_names_here():
    body = {"prompt": "a", "max_tokens": 3, "max_completion_tokens": None, "stop_token_ids": [4], "stop": ["x", "y"]}
    _, options = openai.request(COMPLETIONS, body)
    assert options == {"raw": True, "max_new_tokens": 3, "stop_ids": [4], "stop": ["x", "y"]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": [0.5]}, r"temperature must be one value, got \[0.5\]"),
        ({"tau": [0.5]}, r"tau must be one value, got \[0.5\]"),
        ({"max_tokens": [4]}, r"max_tokens must be one value, got \[4\]"),
        ({"measure": ["margin"]}, r'measure must be one value, got \["margin"\]'),
        ({"seed": [1] * 1000}, r"seed must be one value, got \[1, 1, .{0,60}\.\.\.$"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens says again"),
        ({"tool_choice": "auto"}, 'tool_choice="auto" is not supported'),
        ({"prompt": []}, "body needs prompt"),
        ({"prompt": [""]}, "body needs prompt"),
        ({"prompt": ["a", "b"]}, "prompt holds 2 prompts"),
        ({"prompt": [[1], [2]]}, "prompt holds 2 prompts"),
        ({"prompt": [["a"]]}, "prompt must be a text or a list of token ids"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "prompt must be a text or a list of token ids"),
        ({"prompt": 5}, "prompt must be a text or a list of token ids, got 5"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_bodies(body, words):
    with pytest.raises(ValueError, match=words):
        openai.request(COMPLETIONS, {"prompt": "a"} | body)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "message 0: 'content' is a list without parts"),
        (["a"], "message 0: parts of 'content' must be objects"),
        ([TEXT, {"type": "image_url", "image_url": {}}], 'message 0: parts of type "image_url" are not supported'),
        ([{"type": "text"}], "message 0: 'text' of a part must be a string, got null"),
    ],
    ids=str,
)
def test_bad_parts(content, words):
    with pytest.raises(ValueError, match=words):
        openai.request(CHAT, {"messages": [{"role": "user", "content": content}]})


def test_messages_speak_of_the_names_in_the_body():
    message = "max_new_tokens=9 is too many; use stop_ids, not stop"
    for body, name in (({}, "max_tokens"), ({"max_tokens": None, "max_completion_tokens": 9}, "max_completion_tokens")):
        assert openai.in_names_of(body, message) == f"{name}=9 is too many; use stop_token_ids, not stop"
