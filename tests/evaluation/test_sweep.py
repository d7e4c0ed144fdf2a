import dataclasses

import pytest

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.problems import problem
from marsjax.decoding.result import Result
from marsjax.evaluation import sweep


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


def answered(tokenizer, text: str, chunks=None, seconds: float = 2.0) -> Result:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Result(
        text=text, ids=ids, prompt_ids=[1], finish_reason="stop", stop=None, chunks=chunks or [1] * len(ids), seed=0,
        forwards=len(chunks or ids), draft_forwards=0,
        seconds=seconds, prefill_seconds=0.0,
    )  # fmt: skip


class Recorder:
    """Stands for a generator: answers with the question, remembers the batches."""

    def __init__(self, tokenizer):
        self.tokenizer, self.batches = tokenizer, []

    def generate(self, prompts, **options):
        self.batches.append(list(prompts))
        return [answered(self.tokenizer, text) for text in prompts]


def test_every_problem_is_answered_once_in_batches_of_one_shape(tokenizer):
    problems = [problem(0, i, "test") for i in range(7)]
    generator = Recorder(tokenizer)
    results = sweep.decode(generator, problems, tau=0.9, batch_size=3, max_new_tokens=5)
    assert [r.text for r in results] == [p.question for p in problems]
    assert [len(batch) for batch in generator.batches] == [3, 3, 3]


def test_score_counts_by_hand(tokenizer):
    problems = [problem(0, i, "test") for i in range(4)]
    results = [answered(tokenizer, p.answer) for p in problems]
    wrong = answered(tokenizer, "The answer is nobody.")
    reference = [*results[:3], wrong]
    scored = sweep.score(tokenizer, problems, [*results[:2], wrong, wrong], reference, batch_size=2)
    assert scored["accuracy"] == 0.5
    assert scored["identical_to_ar"] == 0.75
    assert scored["tokens_per_forward"] == 1.0
    tokens = sum(len(r.ids) for r in results[:2]) + 2 * len(wrong.ids)
    assert scored["tokens_per_second"] == pytest.approx(tokens / 4.0)  # two batches of two seconds each


def test_phrases_and_numbers_are_told_apart_and_share_the_forwards(tokenizer):
    base = problem(0, 0, "test")
    text = "In all 12."
    ids = tokenizer.encode(text, add_special_tokens=False)
    kinds = [bool(set(tokenizer.decode([i])) & set("0123456789")) for i in ids]
    assert sum(kinds) == 2
    # The phrase before the digits in one forward, each digit alone, the full stop alone.
    before = kinds.index(True)
    answer = answered(tokenizer, text, [before, 1, 1, len(ids) - before - 2])
    scored = sweep.score(tokenizer, [base], [answer], [answer], batch_size=1)
    assert scored["tokens_per_forward_numbers"] == 1.0
    assert scored["tokens_per_forward_phrases"] == pytest.approx((len(ids) - 2) / 2)
    # One forward for everything counts a share for each token.
    leap = dataclasses.replace(answer, chunks=[len(ids)], forwards=1)
    scored = sweep.score(tokenizer, [base], [leap], [leap], batch_size=1)
    assert scored["tokens_per_forward_numbers"] == pytest.approx(len(ids))
    assert scored["tokens_per_forward"] == len(ids)


def test_names_of_the_question_count_as_numbers(tokenizer):
    base = next(p for p in (problem(0, i, "test") for i in range(200)) if p.family == "reverse")
    answer = answered(tokenizer, base.answer)
    scored = sweep.score(tokenizer, [base], [answer], [answer], batch_size=1)
    assert scored["accuracy"] == 1.0
    assert scored["tokens_per_forward_numbers"] == 1.0
