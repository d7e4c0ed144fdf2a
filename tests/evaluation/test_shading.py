import re

import pytest
from rich.console import Console

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.decoding.result import Result
from marsjax.evaluation import shading


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


def result(tokenizer, text: str, chunks: list[int] | None = None) -> Result:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Result(
        text=text, ids=ids, prompt_ids=[1], finish_reason="length", stop=None, chunks=chunks or [1] * len(ids), seed=0,
        forwards=len(chunks or ids), draft_forwards=0,
        seconds=1.0, prefill_seconds=0.0,
    )  # fmt: skip


def test_chunk_texts_join_to_the_text_and_carry_the_counts(tokenizer):
    text = "The answer is 4 € <b>12</b>."
    n = len(tokenizer.encode(text, add_special_tokens=False))
    for first in range(1, n):  # every cut, also inside the bytes of "€"
        answer = result(tokenizer, text, [first, n - first])
        pieces = list(shading.chunk_texts(tokenizer, answer))
        assert "".join(piece for piece, _ in pieces) == text
        assert [tokens for _, tokens in pieces] == [first, n - first]


def test_html_is_escaped_and_shaded_by_length(tokenizer):
    text = "1 <b> & 22"
    n = len(tokenizer.encode(text, add_special_tokens=False))
    marked = shading.for_html(tokenizer, result(tokenizer, text, [1, n - 1]))
    assert "<b>" not in marked
    assert re.findall(r'class="chunk c(\d)"', marked) == ["1", str(min(n - 1, 5))]
    assert f'title="{n - 1} tokens"' in marked
    assert 'title="1 token"' in marked


def test_longer_chunks_are_darker():
    def brightness(colour: str) -> int:
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    assert shading.shade(1) == ""
    shades = [brightness(shading.shade(n)) for n in range(2, 6)]
    assert shades == sorted(shades, reverse=True)
    assert shading.shade(16) == shading.shade(5)


def test_terminal_text_shows_every_chunk(tokenizer):
    answer = result(tokenizer, "In all 12.")
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shading.for_terminal(tokenizer, answer))
    shown = console.export_text().strip()
    assert shown.count("│") == len(answer.chunks)
    assert shown.replace("│", "") == "In all 12."
