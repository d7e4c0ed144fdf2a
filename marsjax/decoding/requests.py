"""What users ask for → arrays, one entry a row. Everything wrong is refused here, before any work."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from marsjax.decoding import plans
from marsjax.decoding.acceptance import ENTROPY, MARGIN, MEASURES
from marsjax.decoding.sampling import MIN_TEMPERATURE
from marsjax.decoding.step import Strategy
from marsjax.text.chat import render_prompt

MAX_SEED = 2**32
MAX_TEMPERATURE = 1e6  # all but uniform already


_BYTES = bytes | bytearray | memoryview  # sequences of integers, but no token ids


def split_batch(prompts: Any) -> tuple[list[Any], bool]:
    """(prompts as a list, whether one prompt was given). One prompt is a text, a list of ids, or a list of messages.

    An empty list is a list of no prompts: whoever filters prompts may keep none.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise TypeError(f"prompts must be a text, ids, messages or a list of them, got {type(prompts).__name__}")
    single = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | np.ndarray)
    return ([list(prompts)] if single else list(prompts)), single


def prompt_ids(prompt: Any, tokenizer: Any, vocab_size: int, *, raw: bool) -> list[int]:
    """Token ids of one prompt; texts go through the chat template unless `raw` or there is none."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, _BYTES):
        raise TypeError(f"a prompt must be a text, token ids or messages, got {type(prompt).__name__}")
    is_text = isinstance(prompt, str)
    if isinstance(prompt, str):
        _check_text(prompt)
    is_messages = not is_text and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not (is_text or is_messages):
        return _checked_ids(prompt, vocab_size)
    if tokenizer is None:
        raise ValueError("this generator has no tokenizer; give the prompt as token ids")
    if is_messages and raw:
        raise ValueError("raw=True takes plain text or ids, not messages")
    if is_text and (raw or not tokenizer.chat_template):
        # With the special tokens its tokenizer puts around plain text, such as Llama 3's start token.
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        messages: Any = [{"role": "user", "content": prompt}] if is_text else prompt
        ids = render_prompt(tokenizer, messages)
    return _checked_ids(ids, vocab_size)


def _check_text(text: str) -> None:
    if not text:
        # The template, or a start token, would make tokens of it, and the answer would be to nothing anyone asked.
        raise ValueError("the prompt is empty: a text needs at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape what UTF-8 cannot hold
        half = f"{text[error.start]!r} at {error.start}"
        raise ValueError(f"the prompt holds half a surrogate pair, {half}: no character") from None


def _checked_ids(ids: Sequence[Any], vocab_size: int) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty; it needs at least one token")
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"token ids must be integers, but entry {i} of the prompt is {_shown(token)}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {_shown(token)} at entry {i} of the prompt is outside 0..{vocab_size - 1}")
    return [int(token) for token in ids]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One checked request, in the dtypes of `marsjax.decoding.step.Controls`."""

    prompt: list[int]
    max_new_tokens: int
    tau: np.float32
    measure: np.int32
    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    seed: np.uint32
    rejection: bool
    ends: tuple[int, ...]
    stops: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.max_new_tokens

    def controls(self) -> dict[str, Any]:
        names = ("tau", "measure", "temperature", "top_k", "top_p", "seed", "rejection", "ends")
        return {name: getattr(self, name) for name in names}


def check(
    prompts: list[list[int]],
    *,
    strategy: Strategy,
    max_positions: float,
    vocab_size: int,
    has_tokenizer: bool,
    eos_ids: Sequence[int],
    tau: Any = None,
    measure: Any = "probability",
    max_new_tokens: Any = 256,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    seed: Any = None,
    verification: Any = "coupled",
    stop: str | Iterable[str] | None = (),
    stop_ids: Iterable[int] | None = (),
    ignore_eos: bool = False,
) -> list[Spec]:
    """The requests of a call; see `Generator.generate`. Each option but the last three is one value or one a prompt.

    Raises TypeError or ValueError by name.
    """
    rows = len(prompts)
    measures = _per_row("measure", measure, rows, _measure)
    taus = tau_rows(tau, measures)
    limits = _per_row("max_new_tokens", max_new_tokens, rows, _positive_int)
    seeds = [secrets.randbelow(MAX_SEED) for _ in range(rows)] if seed is None else _per_row("seed", seed, rows, _seed)
    temperatures = _per_row("temperature", temperature, rows, _temperature)
    top_ks = _per_row("top_k", 0 if top_k is None else top_k, rows, _top_k)
    top_ps = _per_row("top_p", 1.0 if top_p is None else top_p, rows, _top_p)
    rejections = _per_row("verification", verification, rows, _verification)
    if not isinstance(ignore_eos, bool):
        raise ValueError(f"ignore_eos must be true or false, got {_shown(ignore_eos)}")
    stops = _stop_strings(stop, has_tokenizer)
    ends = end_ids(() if ignore_eos else eos_ids, stop_ids, vocab_size)
    whose = "the shorter of target and draft model" if strategy.name == "speculative" else "the model"
    check_lengths(prompts, limits, max_positions, whose)
    check_strategy(strategy, taus, measures, rejections)
    return [
        Spec(
            prompt=prompts[i],
            max_new_tokens=limits[i],
            tau=taus[i],
            measure=np.int32(measures[i]),
            temperature=np.float32(temperatures[i]),
            # Rows of the vocabulary are far fewer than 2^31, and a top_k beyond them keeps all.
            top_k=np.int32(min(top_ks[i], 2**31 - 1)),
            top_p=np.float32(top_ps[i]),
            seed=np.uint32(seeds[i]),
            rejection=rejections[i],
            ends=ends,
            stops=stops,
        )
        for i in range(rows)
    ]


def check_options(rows: int, **options: Any) -> None:
    """Refuses what would be wrong with any model, before one is read."""
    check(
        [[0]] * rows,
        strategy=Strategy(plans.comb(1)),
        max_positions=math.inf,
        vocab_size=2**31,
        has_tokenizer=True,
        eos_ids=(),
        **options,
    )


def _verification(name: str, value: Any) -> bool:
    if value not in ("coupled", "rejection"):
        raise ValueError(f"{name} must be coupled or rejection, got {_shown(value)}")
    return value == "rejection"


def _stop_strings(stop: Any, has_tokenizer: bool) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else _list("stop", stop, "a string or a list of strings")
    for one in stops:
        if not isinstance(one, str) or not one:
            raise ValueError(
                f"stop must be strings of at least one character, got {_shown(one)}; token ids go to stop_ids"
            )
    if stops and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this generator has none; use stop_ids")
    return stops


def _list(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    """The entries of an option that may have several; None is none of them."""
    if value is None:
        return ()
    if hasattr(value, "tolist"):  # an array, perhaps of no dimension
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping | _BYTES):
        raise ValueError(f"{name} must be {allowed}, got {_shown(value)}")
    return tuple(value)


def _shown(value: Any) -> str:
    """A value as a message shows it: no pages of digits, which Python may refuse to write out besides."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of over 4,300 digits"
    return text if len(text) <= 60 else text[:57] + "..."


def check_lengths(
    prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], max_positions: float, whose: str = "the model"
) -> None:
    for row, (ids, limit) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        needed = len(ids) + limit
        if needed > max_positions:
            raise ValueError(
                f"prompt {row} has {len(ids)} tokens; with max_new_tokens={_shown(limit)} that makes {_shown(needed)}, "
                f"but {whose} has {max_positions} positions: shorten the prompt or the limit"
            )


def check_strategy(
    strategy: Strategy, taus: Sequence[Any] | np.ndarray, measures: Sequence[int], rejections: Sequence[bool]
) -> None:
    """Refuses what a strategy would silently ignore: τ, or rejection sampling of drafts."""
    for tau, measure in zip(taus, measures, strict=True):
        if tau != ar_tau(measure) and not strategy.takes_tau:
            raise ValueError(
                f"tau={tau:g} has no meaning with strategy {strategy.name!r}, which gives the model's own tokens: "
                + (
                    "give window (2 or more) with a model fine-tuned with MARS"
                    if strategy.name == "speculative"
                    else "use a model with a mask token and strategy 'mars'"
                )
                + ", or leave tau out"
            )
    if any(rejections) and not strategy.plan.drafts:
        raise ValueError(
            "verification='rejection' belongs to strategies that verify drafts (chain, comb, tree, speculative ...), "
            f"not to {strategy.name}"
        )


def end_ids(eos_ids: Sequence[int], stop_ids: Iterable[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a row, each once."""
    stop_ids = _list("stop_ids", stop_ids, "a list of token ids")
    return tuple(dict.fromkeys([*eos_ids, *(_stop_id("stop_ids", i, vocab_size) for i in stop_ids)]))


def _stop_id(name: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < vocab_size:
        raise ValueError(f"{name} must be token ids in 0..{vocab_size - 1}, got {_shown(value)}")
    return int(value)


def tau_rows(tau: Any, measures: Sequence[int] | np.ndarray) -> np.ndarray:
    """τ of each row, [N] float32, checked against the row's measure; None is the measure's AR value."""
    values = [tau] * len(measures) if tau is None else _per_row("tau", tau, len(measures), lambda _, value: value)
    return np.asarray([_tau(v, m) for v, m in zip(values, measures, strict=True)], np.float32)


def ar_tau(measure: int) -> float:
    """The τ that is AR."""
    return 0.0 if measure == ENTROPY else 1.0


def _tau(value: Any, measure: int) -> float:
    if value is None:
        return ar_tau(measure)
    value = _number("tau", value)
    if measure == ENTROPY:
        good, allowed = value >= 0, "at least 0 (nats; 0 is AR)"
    elif measure == MARGIN:
        good, allowed = 0 <= value <= 1, "in 0..1 (1 is AR)"
    else:
        good, allowed = 0 < value <= 1, "above 0 and at most 1 (1 is AR)"
    if not good:
        raise ValueError(f"tau={value:g} is out of range: with measure {MEASURES[measure]!r} it must be {allowed}")
    # A τ just below 1 must not become 1, which means AR, by rounding to float32.
    return min(value, float(np.nextafter(np.float32(1), np.float32(0)))) if measure != ENTROPY and value < 1 else value


def _per_row(name: str, value: Any, rows: int, check: Callable[[str, Any], Any]) -> list[Any]:
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != rows:
            raise ValueError(f"{name} has {len(value)} entries for {rows} prompts; give one value, or one a prompt")
        return [check(name, v.item() if isinstance(v, np.generic) else v) for v in value]
    return [check(name, value)] * rows


def _number(name: str, value: Any) -> float:
    try:
        good = not isinstance(value, bool) and isinstance(value, int | float | np.number) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        good = False
    if not good:
        raise ValueError(f"{name} must be a finite number, got {_shown(value)}")
    return float(value)


def _measure(name: str, value: Any) -> int:
    if value not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {_shown(value)}")
    return MEASURES.index(value)


def _int(name: str, value: Any, low: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be {allowed}, got {_shown(value)}")
    return int(value)


def _positive_int(name: str, value: Any) -> int:
    return _int(name, value, 1, "an integer of at least 1")


def _top_k(name: str, value: Any) -> int:
    return max(0, _int(name, value, -1, "an integer of at least 0 (0, like -1, keeps the whole vocabulary)"))


def _seed(name: str, value: Any) -> int:
    if _int(name, value, 0, "an integer of at least 0") >= MAX_SEED:
        raise ValueError(f"seed must be below 2^32, got {_shown(value)}")
    return int(value)


def _temperature(name: str, value: Any) -> float:
    value = _number(name, value)
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (greedy) or in {MIN_TEMPERATURE:g}..{MAX_TEMPERATURE:g}, got {value:g}"
        )
    return value


def _top_p(name: str, value: Any) -> float:
    value = _number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"top_p must be in 0..1 (0 keeps the likeliest token, 1 all), got {value:g}")
    return value
