"""What a threshold buys and costs: held-out problems decoded at several τ."""

import bisect
import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from marsjax.data.problems import Problem, is_correct, number_spans
from marsjax.decoding.generator import Generator
from marsjax.decoding.result import Result
from marsjax.evaluation.shading import chunk_texts


def decode(
    generator: Generator, problems: Sequence[Problem], *, tau: float | None, batch_size: int, max_new_tokens: int
) -> list[Result]:
    """One answer a problem, greedily, in full batches of one shape (the last is filled up with repeats)."""
    results: list[Result] = []
    for start in range(0, len(problems), batch_size):
        questions = [p.question for p in problems[start : start + batch_size]]
        filled = questions + questions[-1:] * (batch_size - len(questions))
        answers = generator.generate(filled, tau=tau, max_new_tokens=max_new_tokens)
        results += answers[: len(questions)]
    return results


def score(
    tokenizer, problems: Sequence[Problem], results: Sequence[Result], reference: Sequence[Result], *, batch_size: int
) -> dict[str, Any]:
    """Accuracy and speed of `results`, JSON-able.

    `accuracy`: share of problems whose final answer is right. `tokens_per_forward`: returned tokens over forwards of
    their rows; `phrases` and `numbers` the same for the tokens of each kind, where a forward counts for each of its
    n tokens as 1/n. `tokens_per_second`: returned tokens over the wall time of the decode loop, prefill and
    compilation apart. `identical_to_ar`: share of answers equal, token for token, to those of `reference`.
    """
    tokens = sum(len(r.ids) for r in results)
    seconds = sum(r.seconds for r in results[::batch_size])  # a batch's results share its time
    phrases, numbers = _by_kind(tokenizer, problems, results)
    return {
        "accuracy": fmean(is_correct(p, r.text or "") for p, r in zip(problems, results, strict=True)),
        "tokens_per_forward": tokens / sum(r.forwards for r in results),
        "tokens_per_forward_phrases": phrases,
        "tokens_per_forward_numbers": numbers,
        "tokens_per_second": tokens / seconds if seconds else None,
        "identical_to_ar": fmean(a.ids == b.ids for a, b in zip(results, reference, strict=True)),
        "problems": len(problems),
    }


def _by_kind(tokenizer, problems: Sequence[Problem], results: Sequence[Result]) -> tuple[float, float]:
    """Tokens per forward of (phrases, numbers)."""
    tokens, forwards = [0, 0], [0.0, 0.0]
    for problem, result in zip(problems, results, strict=True):
        spans = number_spans(dataclasses.replace(problem, answer=result.text or ""))
        starts = [start for start, _ in spans]
        position = 0
        singles = dataclasses.replace(result, chunks=[1] * len(result.ids))
        sizes = [size for size in result.chunks for _ in range(size)]
        for (text, _), size in zip(chunk_texts(tokenizer, singles), sizes, strict=True):
            # A word's token carries the space before it: what matters is where its last character lies.
            last = position + len(text) - 1
            i = bisect.bisect_right(starts, last) - 1
            kind = int(bool(text) and i >= 0 and last < spans[i][1])
            tokens[kind] += 1
            forwards[kind] += 1 / size
            position += len(text)
    phrases, numbers = (t / f if f else 0.0 for t, f in zip(tokens, forwards, strict=True))
    return phrases, numbers
