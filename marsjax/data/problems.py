"""The project's own instruction data: formulaic problems, solved in writing, with one checkable answer.

`problem(seed, index, split)` is a pure function. Whether a problem may be trained on is decided by a hash of its
*facts* (family, and the numbers or listed names that fix the answer), not by the stream it was drawn from: a held-out
problem therefore cannot occur in training under any seed, nor in other words or with other people in it.

Answers say fixed phrases around digits and names. The phrases are what a model is soon sure of; the numbers are what it
must work for, so each step is one simple operation: a table of one-digit sums or products, or adding round numbers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

SPLITS = ("train", "validation", "test")
_BUCKETS = 20  # of these, one is validation, two are test, the rest is train


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jack Kim Leo Mia Noah Olga Paul Rosa Sam Tina Uma Vera Will Yara Zoe "
    "Anna Carl Emma Ivan Lena Max Nina Otto Ruth Tom"
)
CITIES = _words("Athens Bern Cairo Delhi Essen Faro Genoa Hanoi Lima Madrid Nice Oslo Paris Rome Sofia Turin")
GOODS = _words("pens cups hats books lamps bags balls keys rings forks plates toys")
FOODS = _words("apples pears plums eggs nuts figs cakes limes")
BOXES = _words("box bag crate basket tray")
VEHICLES = _words("train bus car truck van boat")
PLACES = _words("garden shop school harbour library museum")
_NAMES = frozenset(PEOPLE) | frozenset(CITIES)


@dataclass(frozen=True)
class Problem:
    """One problem: what the user asks, what the assistant writes, and the answer to check (`final`)."""

    question: str
    answer: str
    final: str
    family: str


# --- writing out arithmetic: every equation has one operation whose digits are easy -------------------------------


def _plus(a: int, b: int) -> str:
    if b < 10 or a % 10 == 0 or b % 10 == 0:
        return f"{a} + {b} = {a + b}"
    tens, ones = b - b % 10, b % 10
    return f"{a} + {tens} = {a + tens}, {a + tens} + {ones} = {a + b}"


def _minus(a: int, b: int) -> str:
    if b < 10 or b % 10 == 0:
        return f"{a} - {b} = {a - b}"
    tens, ones = b - b % 10, b % 10
    return f"{a} - {tens} = {a - tens}, {a - tens} - {ones} = {a - b}"


# --- families: rng -> (question, steps, final) ---------------------------------------------------------------------


def _shopping(r: Random) -> tuple[str, str, str]:
    who, (x, y) = r.choice(PEOPLE), r.sample(GOODS, 2)
    a, b = r.randint(3, 9), r.randint(3, 9)
    p, q = r.randint(10 // a + 1, 9), r.randint(10 // b + 1, 9)
    question = r.choice(
        (
            f"{who} buys {a} {x} at {p} coins each and {b} {y} at {q} coins each. How many coins does {who} pay?",
            f"In the shop {x} cost {p} coins each and {y} cost {q}. {who} buys {b} {y} and {a} {x}. How much is that?",
            f"How many coins does {who} pay for {a} {x} at {p} coins each and {b} {y} at {q} coins each?",
        )
    )
    steps = f"The {x} cost {a} x {p} = {a * p}. The {y} cost {b} x {q} = {b * q}. "
    return question, steps + f"In all {_plus(a * p, b * q)}.", str(a * p + b * q)


def _spending(r: Random) -> tuple[str, str, str]:
    who, x, y = r.choice(PEOPLE), *r.sample(GOODS, 2)
    a, b = r.randint(11, 39), r.randint(11, 39)
    total = r.randint(a + b + 1, 99)
    question = r.choice(
        (
            f"{who} has {total} coins, pays {a} for {x} and {b} for {y}. How many coins are left?",
            f"From {total} coins {who} pays {a} for {x} and then {b} for {y}. How many coins does {who} still have?",
            f"{who} spends {a} coins on {x} and {b} on {y} and had {total} coins. What is left?",
        )
    )
    steps = f"After the {x} {who} has {_minus(total, a)}. After the {y} {who} has {_minus(total - a, b)}."
    return question, steps, str(total - a - b)


def _travel(r: Random) -> tuple[str, str, str]:
    it, (here, there) = r.choice(VEHICLES), r.sample(CITIES, 2)
    t, v, d = r.randint(2, 9), 10 * r.randint(2, 9), r.randint(3, 99)
    question = r.choice(
        (
            f"A {it} goes from {here} for {t} hours at {v} km an hour and then {d} km more to {there}. "
            "How many km is that?",
            f"How far is it from {here} to {there} if a {it} drives {t} hours at {v} km an hour and {d} km are left?",
            f"A {it} leaves {here}, drives {t} hours at {v} km an hour, and {there} is {d} km further. How far is it?",
        )
    )
    steps = f"In {t} hours the {it} goes {t} x {v} = {t * v} km. "
    return question, steps + f"From {here} to {there} it is {_plus(t * v, d)} km.", str(t * v + d)


def _boxes(r: Random) -> tuple[str, str, str]:
    who, box, x = r.choice(PEOPLE), r.choice(BOXES), r.choice(FOODS)
    n, each = r.randint(2, 9), 10 * r.randint(1, 9) + r.randint(1, 9)
    tens, ones = each - each % 10, each % 10
    boxes = {"box": "boxes"}.get(box, box + "s")
    question = r.choice(
        (
            f"Each {box} holds {each} {x}. {who} has {n} {boxes}. How many {x} does {who} have?",
            f"{who} fills {n} {boxes} with {each} {x} each. How many {x} is that?",
            f"How many {x} are in {n} {boxes} if each {box} holds {each}?",
        )
    )
    steps = f"First {n} x {tens} = {n * tens}, then {n} x {ones} = {n * ones}. "
    return question, steps + f"In all {_plus(n * tens, n * ones)}.", str(n * each)


def _sharing(r: Random) -> tuple[str, str, str]:
    who, x = r.choice(PEOPLE), r.choice(FOODS)
    friends, kept = r.randint(2, 9), r.randint(2, 9)
    each = r.randint(10 // friends + 1, 9)
    rest = friends * each
    n = rest + kept
    question = r.choice(
        (
            f"{who} has {n} {x}, keeps {kept} and shares the rest fairly among {friends} friends. "
            f"How many {x} does each friend get?",
            f"{friends} friends of {who} share {n} {x} fairly after {who} ate {kept}. How many does each one get?",
            f"There are {n} {x}. {who} takes {kept}, and {friends} friends get the same of the rest. How many is that?",
        )
    )
    steps = f"Without {kept} there are {_minus(n, kept)}. Each of {friends} gets {rest} / {friends} = {each}."
    return question, steps, str(each)


def _sequence(r: Random) -> tuple[str, str, str]:
    who, step, times = r.choice(PEOPLE), r.randint(2, 9), r.randint(3, 4)
    up = r.random() < 0.5
    start = r.randint(10, 60) if up else r.randint(step * times + 10, 99)
    way, sign = ("up", "+") if up else ("down", "-")
    question = r.choice(
        (
            f"{who} starts at {start} and counts {way} by {step}, {times} times. What is the last number?",
            f"Start at {start} and count {way} {times} times by {step}. Where do you end?",
            f"Count {way} from {start} in steps of {step}. Which number comes after {times} steps?",
        )
    )
    values = [start + (step if up else -step) * i for i in range(times + 1)]
    steps = ", ".join(f"{i + 1}: {values[i]} {sign} {step} = {values[i + 1]}" for i in range(times))
    return question, f"Count {way} by {step}. {steps}.", str(values[-1])


def _ages(r: Random) -> tuple[str, str, str]:
    a, b, c = r.sample(PEOPLE, 3)
    age, d, e = r.randint(20, 60), r.randint(2, 19), r.randint(2, 9)
    (w1, s1), (w2, s2) = (r.choice((("older", 1), ("younger", -1))) for _ in range(2))
    second = age + s1 * d
    third = second + s2 * e
    question = r.choice(
        (
            f"{a} is {age} years old. {b} is {d} years {w1} than {a}. {c} is {e} years {w2} than {b}. How old is {c}?",
            f"How old is {c}, who is {e} years {w2} than {b}, if {b} is {d} years {w1} than {a} and {a} is {age}?",
            f"{b} is {d} years {w1} than {a}, and {c} is {e} years {w2} than {b}. {a} is {age}. How old is {c}?",
        )
    )
    first = _plus(age, d) if s1 > 0 else _minus(age, d)
    then = _plus(second, e) if s2 > 0 else _minus(second, e)
    steps = f"For {b}, {w1} than {a}: {first}. For {c}, {w2} than {b}: {then}."
    return question, steps, str(third)


_UNITS = (
    ("hours", "minutes", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
    ("minutes", "seconds", 60),
    ("years", "months", 12),
    ("metres", "cm", 100),
)


def _conversion(r: Random) -> tuple[str, str, str]:
    big, small, factor = r.choice(_UNITS)
    who, n, extra = r.choice(PEOPLE), r.randint(2, 9), r.randint(min(10, factor // 2), factor - 1)
    total = n * factor + extra
    question = r.choice(
        (
            f"How many {small} are {n} {big} and {extra} {small}?",
            f"Write {n} {big} and {extra} {small} in {small}.",
            f"{who} measures {n} {big} and {extra} {small}. How many {small} is that?",
        )
    )
    steps = f"The {n} {big} are {n} x {factor} = {n * factor}. In all {_plus(n * factor, extra)}."
    return question, steps, str(total)


def _table(r: Random) -> tuple[str, str, str]:
    people = r.sample(PEOPLE, 3)
    place, x = r.choice(PLACES), r.choice(FOODS)
    counts = [r.randint(11, 59) for _ in people]
    i, j = r.sample(range(3), 2)
    listed = ", ".join(f"{p} {n}" for p, n in zip(people, counts, strict=True))
    question = r.choice(
        (
            f"List of {x}: {listed}. How many do {people[i]} and {people[j]} have in all?",
            f"In the {place} they count {x}: {listed}. What is the sum for {people[i]} and {people[j]}?",
            f"Here is a table of {x}: {listed}. Add those of {people[i]} and {people[j]}.",
        )
    )
    steps = f"For {people[i]} {counts[i]}, for {people[j]} {counts[j]}. In all {_plus(counts[i], counts[j])}."
    return question, steps, str(counts[i] + counts[j])


def _most(r: Random) -> tuple[str, str, str]:
    people = r.sample(PEOPLE, r.randint(3, 4))
    x, counts = r.choice(GOODS), r.sample(range(10, 100), len(people))
    word, better = r.choice((("most", max), ("fewest", min)))
    listed = ", ".join(f"{p} {n}" for p, n in zip(people, counts, strict=True))
    question = r.choice(
        (
            f"List of {x}: {listed}. How many has the one with the {word}?",
            f"They count their {x}: {listed}. How many {x} are the {word}?",
            f"How many {x} are the {word} here? {listed}.",
        )
    )
    steps, kept = [], counts[0]
    for other in counts[1:]:
        steps.append(f"{kept} or {other}: {better(kept, other)}")
        kept = better(kept, other)
    return question, f"The {word} of {', '.join(map(str, counts))}. {', '.join(steps)}.", str(kept)


def _listed(r: Random, low: int, high: int) -> list[str]:
    """Names with different first letters, so that their alphabetical order is the order of those letters."""
    names: list[str] = []
    wanted, pool = r.randint(low, high), r.choice((PEOPLE, CITIES))
    while len(names) < wanted:
        name = r.choice(pool)
        if all(name[0] != other[0] for other in names):
            names.append(name)
    return names


def _reverse(r: Random) -> tuple[str, str, str]:
    names = _listed(r, 4, 5)
    listed = ", ".join(names)
    question = r.choice(
        (
            f"Write these names in reverse order: {listed}.",
            f"Turn this list around: {listed}.",
            f"Here is a list: {listed}. Write it from back to front.",
        )
    )
    turned = ", ".join(names[::-1])
    return question, f"From back to front: {turned}.", turned


def _sort(r: Random) -> tuple[str, str, str]:
    names = _listed(r, 3, 4)
    listed = ", ".join(names)
    question = r.choice(
        (
            f"Sort these names by the alphabet: {listed}.",
            f"Put this list into alphabetical order: {listed}.",
            f"Here is a list: {listed}. Write it in the order of the alphabet.",
        )
    )
    ordered = ", ".join(sorted(names))
    return question, f"By the alphabet: {ordered}.", ordered


def _digits(r: Random) -> tuple[str, str, str]:
    digits = [r.randint(1, 9) for _ in range(r.randint(3, 5))]
    number, who = "".join(map(str, digits)), r.choice(PEOPLE)
    question = r.choice(
        (
            f"What is the sum of the digits of {number}?",
            f"{who} adds the digits of {number}. What is the sum?",
            f"Add all digits of the number {number}.",
        )
    )
    sums, total = [], digits[0]
    for digit in digits[1:]:
        sums.append(_plus(total, digit))
        total += digit
    return question, f"For {number}: {', '.join(sums)}.", str(total)


_FAMILIES: dict[str, Callable[[Random], tuple[str, str, str]]] = {
    "shopping": _shopping,
    "spending": _spending,
    "travel": _travel,
    "boxes": _boxes,
    "sharing": _sharing,
    "sequence": _sequence,
    "ages": _ages,
    "conversion": _conversion,
    "table": _table,
    "most": _most,
    "reverse": _reverse,
    "sort": _sort,
    "digits": _digits,
}
FAMILIES = tuple(_FAMILIES)


def split_of(question: str, family: str) -> str:
    """The one split a question belongs to: a hash of its family and of the facts that fix its answer."""
    facts = sorted(re.findall(r"\d+", question)) or sorted(_names_in(question))
    key = f"{family}|{' '.join(facts)}".encode()
    bucket = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") % _BUCKETS
    return "validation" if bucket == 0 else "test" if bucket in (1, 2) else "train"


def problem(seed: int, index: int, split: str = "train") -> Problem:
    """The `index`-th problem of a split's stream. Deterministic; splits share no problem, whatever their seeds."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; the generator has {', '.join(SPLITS)}")
    if index < 0:
        raise ValueError(f"problem index {index} is negative; streams start at 0")
    stream = blake2b(f"{seed}|{split}|{index}".encode(), digest_size=16).digest()
    rng = Random(int.from_bytes(stream, "big"))
    family = rng.choice(FAMILIES)  # drawn once, so that families stay equally frequent in every split
    while True:
        question, steps, final = _FAMILIES[family](rng)
        if split_of(question, family) == split:
            return Problem(question, f"{steps} The answer is {final}.", final, family)


# --- checking -------------------------------------------------------------------------------------------------------


def extract_final(text: str) -> str | None:
    """What the last finished "The answer is …." of a text says; None when there is none (or it was cut off)."""
    found = re.findall(r"The answer is ([^.\n]+)\.", text)
    return " ".join(found[-1].split()) if found else None


def is_correct(problem: Problem, text: str) -> bool:
    """Whether a generated text gives the problem's final answer."""
    return extract_final(text) == problem.final


def number_spans(problem: Problem) -> list[tuple[int, int]]:
    """[start, end) character spans of the answer which are *numbers*: digit runs, and names the question mentions.

    Everything outside is phrase. Used to report tokens per forward for both apart.
    """
    known = _names_in(problem.question)
    words = re.finditer(r"\d+|[A-Za-z]+", problem.answer)
    return [w.span() for w in words if w[0].isdigit() or w[0] in known]


def _names_in(text: str) -> frozenset[str]:
    return _NAMES.intersection(re.findall(r"[A-Z][a-z]+", text))
