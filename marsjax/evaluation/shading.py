"""An answer with its accepted chunks shaded (as in arXiv 2604.07023, Figure 1): the darker, the longer the leap."""

import html
from collections.abc import Iterator

from rich.text import Text

from marsjax.decoding.result import Result
from marsjax.text.streaming import Detokenizer

# Background by tokens accepted in one forward: one is left plain, longer runs go from light to dark green.
SHADES = ("", "#d9f0d3", "#a6dba0", "#5aae61", "#1b7837")


def shade(tokens: int) -> str:
    """Background colour of a chunk of so many tokens; empty for one token."""
    return SHADES[min(tokens, len(SHADES)) - 1]


def chunk_texts(tokenizer, result: Result) -> Iterator[tuple[str, int]]:
    """(text, tokens) of each forward's chunk, in order; a character split over chunks comes with its last one."""
    detokenizer = Detokenizer(tokenizer)
    start = 0
    for i, tokens in enumerate(result.chunks):
        text = detokenizer.push(result.ids[start : start + tokens])
        start += tokens
        if i == len(result.chunks) - 1:
            text += detokenizer.finish()
        yield text, tokens


def for_terminal(tokenizer, result: Result) -> Text:
    """For `rich.print`. Neighbouring chunks are told apart by a thin bar."""
    shaded = Text()
    for text, tokens in chunk_texts(tokenizer, result):
        colour = shade(tokens)
        style = f"{'white' if tokens > 3 else 'black'} on {colour}" if colour else ""
        shaded.append(text, style=style)
        shaded.append("│", style="dim")
    return shaded


def for_html(tokenizer, result: Result) -> str:
    """A run of <span> elements; class `cN` says how many tokens the chunk has."""
    return "".join(
        f'<span class="chunk c{min(tokens, len(SHADES))}" title="{tokens} token{"s" * (tokens > 1)}">'
        f"{html.escape(text)}</span>"
        for text, tokens in chunk_texts(tokenizer, result)
    )


def css() -> str:
    """The style sheet that `for_html` needs."""
    rules = [".chunk{white-space:pre-wrap;border-radius:3px;box-shadow:-1px 0 0 #bbb;padding:1px 0}"]
    for tokens in range(2, len(SHADES) + 1):
        rules.append(f".c{tokens}{{background:{shade(tokens)};color:{'#fff' if tokens > 3 else '#111'}}}")
    return "\n".join(rules)
