"""The generator: deterministic, right, disjoint splits, and answers with enough to work for."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.problems import (
    FAMILIES,
    SPLITS,
    extract_final,
    is_correct,
    number_spans,
    problem,
    split_of,
)
from marsjax.text.chat import encode, render_prompt

SAMPLE = [problem(3, i) for i in range(1500)]


def _ages(question):
    told = re.findall(r"(\w+)(?:, who)? is (\d+) years (older|younger) than (\w+)", question)
    (start, age), *_ = re.findall(r"(\w+) is (\d+)(?: years old\.|\.|\?)", question)
    known = {start: int(age)}
    while len(known) < 3:
        for who, years, way, other in told:
            if other in known:
                known[who] = known[other] + (int(years) if way == "older" else -int(years))
    return known[re.search(r"[Hh]ow old is (\w+)", question)[1]]


def solve(family, question):
    """The answer, from the question alone and by other means than the generator's."""
    n = [int(x) for x in re.findall(r"\d+", question)]
    pairs = dict(re.findall(r"([A-Z]\w+) (\d+)", question.replace("Who has", "who has")))
    listed = list(re.findall(r"[A-Z][a-z]+(?=[,.])", question.split(":")[1])) if ":" in question else []
    match family:
        case "shopping":
            return n[0] * n[3] + n[1] * n[2] if question.startswith("In the shop") else n[0] * n[1] + n[2] * n[3]
        case "spending":
            return 2 * max(n) - sum(n)
        case "travel":
            return n[0] * n[1] + n[2]
        case "boxes":
            return math.prod(n)
        case "sharing":
            total = max(n)
            friends = int(re.search(r"(\d+) friends", question)[1])
            return (total - (sum(n) - total - friends)) // friends
        case "sequence":
            return n[0] + n[1] * n[2] * (1 if " up " in question else -1)
        case "ages":
            return _ages(question)
        case "conversion":
            (amount, big, extra, small) = re.search(r"(\d+) (\w+) and (\d+) (\w+)", question).groups()
            size = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604800}
            other = {"feet": 12, "years": 12, "metres": 100}
            each = other[big] if big in other else size[big] // size[small]
            return int(amount) * each + int(extra)
        case "table":
            asked = re.findall(r"(\w+) and (\w+)", question)[-1]
            return sum(int(pairs[who]) for who in asked)
        case "most":
            return (max if "most" in question else min)(n)
        case "reverse":
            return ", ".join(reversed(listed))
        case "sort":
            return ", ".join(sorted(listed))
        case "digits":
            return sum(int(d) for d in str(n[0]))


def test_finals_are_right():
    assert {p.family for p in SAMPLE} == set(FAMILIES)
    for p in SAMPLE:
        assert str(solve(p.family, p.question)) == p.final, p


def test_every_written_equation_holds():
    count = 0
    for p in SAMPLE:
        for a, op, b, c in re.findall(r"(\d+) ([-+x]) (\d+) = (\d+)", p.answer):
            a, b, c = int(a), int(b), int(c)
            assert {"+": a + b, "-": a - b, "x": a * b}[op] == c, p.answer
            count += 1
        assert p.answer.count("=") == len(re.findall(r"\d = \d", p.answer))
    assert count > 2500


def test_deterministic_in_another_process():
    code = "from marsjax.data.problems import problem; print([problem(3, i) for i in range(40)])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert said == str(SAMPLE[:40])
    assert problem(4, 0) != problem(3, 0) != problem(3, 1)


def test_splits_share_no_facts():
    """Not only no question: no question of a split has the numbers or names of one in another."""
    facts = {}
    for split in SPLITS:
        for seed in (0, 7):
            for i in range(1200):
                p = problem(seed, i, split)
                key = (p.family, *sorted(re.findall(r"\d+", p.question) or re.findall(r"[A-Z]\w+(?=[,.])", p.question)))
                assert facts.setdefault(key, split) == split, p
                assert split_of(p.question, p.family) == split
    assert set(facts.values()) == set(SPLITS)


def test_rich():
    questions = {p.question for p in SAMPLE}
    assert len(questions) > 0.99 * len(SAMPLE)
    shapes = {(p.family, re.sub(r"\d+|[A-Z]\w+", "_", p.question)) for p in SAMPLE}
    assert len(shapes) > 150


def test_numbers_are_at_least_thirty_percent_of_the_answer_tokens():
    tokenizer = demo_tokenizer()
    shares = []
    for p in SAMPLE:
        spans = number_spans(p)
        offsets = tokenizer(p.answer, return_offsets_mapping=True)["offset_mapping"]
        numbers = sum(any(a < end and start < b for a, b in spans) for start, end in offsets)
        shares.append(numbers / (len(offsets) + 1))  # the end token is phrase
        assert shares[-1] >= 0.3, p.answer
    assert 0.35 < np.mean(shares) < 0.45


def test_fits_128_tokens():
    tokenizer = demo_tokenizer()
    sizes = [
        len(render_prompt(tokenizer, [{"role": "user", "content": p.question}])) + len(encode(tokenizer, p.answer)) + 1
        for p in SAMPLE
    ]
    assert max(sizes) <= 128
    assert np.mean(sizes) < 100


def test_number_spans_are_digits_and_names_of_the_question():
    p = next(p for p in SAMPLE if p.family == "travel")
    found = [p.answer[a:b] for a, b in number_spans(p)]
    assert all(word.isdigit() or word in p.question for word in found)
    assert {"The", "From", "In", "km"}.isdisjoint(found)
    outside = re.sub(r"\d", "", p.answer)
    assert len(outside) < len(p.answer)
    covered = set().union(*(range(a, b) for a, b in number_spans(p)))
    assert all(i in covered for i, c in enumerate(p.answer) if c.isdigit())


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("3 + 4 = 7. The answer is 7.", "7"),
        ("The answer is 1. No. The answer is Ada,  Ben.", "Ada, Ben"),
        ("The answer is 12", None),  # cut off: may have become 120
        ("the number is 12.", None),
        ("", None),
    ],
)
def test_extract_final(text, final):
    assert extract_final(text) == final


def test_is_correct():
    for p in SAMPLE[:50]:
        assert is_correct(p, p.answer)
        assert not is_correct(p, p.answer.replace(f"answer is {p.final}", f"answer is {p.final}0"))


def test_refuses_unknown_split_and_negative_index():
    with pytest.raises(ValueError, match=r"unknown split 'dev'.*train, validation, test"):
        problem(0, 0, "dev")
    with pytest.raises(ValueError, match="-1 is negative"):
        problem(0, -1)
