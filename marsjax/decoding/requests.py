"""What users ask for → arrays, one entry a row. Everything wrong is refused here, before any work."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marsjax.decoding.acceptance import ENTROPY, MARGIN, MEASURES
from marsjax.decoding.sampling import MIN_TEMPERATURE
from marsjax.text.chat import render_prompt

MAX_SEED = 2**32
MAX_TEMPERATURE = 1e6  # all but uniform already


def split_batch(prompts: Any) -> tuple[list[Any], bool]:
    """(prompts as a list, whether one prompt was given). One prompt is a text, a list of ids, or a list of messages."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a text, ids, messages or a list of them, got {type(prompts).__name__}")
    if not prompts:
        raise ValueError("the prompt is empty; it needs at least one token")
    single = not isinstance(prompts[0], str | Sequence | np.ndarray)
    return ([list(prompts)] if single else list(prompts)), single


def prompt_ids(prompt: Any, tokenizer: Any, vocab_size: int, *, raw: bool) -> list[int]:
    """Token ids of one prompt; texts go through the chat template unless `raw` or there is none."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | Sequence):
        raise TypeError(f"a prompt must be a text, token ids or messages, got {type(prompt).__name__}")
    is_text = isinstance(prompt, str)
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


def _checked_ids(ids: Sequence[Any], vocab_size: int) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty; it needs at least one token")
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"token ids must be integers, but entry {i} of the prompt is {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} at entry {i} of the prompt is outside 0..{vocab_size - 1}")
    return [int(token) for token in ids]


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options, one entry a row, in the dtypes of `marsjax.decoding.step.Controls`."""

    tau: np.ndarray
    measure: np.ndarray
    max_new_tokens: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray


def check_options(
    rows: int, *, tau: Any, measure: Any, max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any, seed: Any
) -> Options:
    """Each option is one value for all rows or a sequence of one a row. Raises TypeError or ValueError by name."""
    measures = _per_row("measure", measure, rows, _measure)
    taus = tau_rows(tau, measures)
    seeds = [secrets.randbelow(MAX_SEED) for _ in range(rows)] if seed is None else _per_row("seed", seed, rows, _seed)
    return Options(
        tau=taus,
        measure=np.asarray(measures, np.int32),
        max_new_tokens=np.asarray(_per_row("max_new_tokens", max_new_tokens, rows, _positive_int), np.int64),
        temperature=np.asarray(_per_row("temperature", temperature, rows, _temperature), np.float32),
        # Rows of the vocabulary are far fewer than 2^31, and a top_k beyond them keeps all.
        top_k=np.minimum(_per_row("top_k", 0 if top_k is None else top_k, rows, _top_k), 2**31 - 1).astype(np.int32),
        top_p=np.asarray(_per_row("top_p", 1.0 if top_p is None else top_p, rows, _top_p), np.float32),
        seed=np.asarray(seeds, np.uint32),
    )


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: np.ndarray, max_positions: int) -> None:
    for row, (ids, limit) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        needed = len(ids) + int(limit)
        if needed > max_positions:
            raise ValueError(
                f"prompt {row} has {len(ids)} tokens; with max_new_tokens={limit} that makes {needed}, but the model "
                f"has {max_positions} positions: shorten the prompt or the limit"
            )


def check_no_threshold(options: Options) -> None:
    """Refuses a τ that a one-token strategy would silently ignore."""
    for tau, measure in zip(options.tau, options.measure, strict=True):
        if tau != ar_tau(measure):
            raise ValueError(
                f"tau={tau:g} has no meaning with strategy 'ar', which gives one token a forward: use a model with a "
                "mask token and strategy 'mars', or leave tau out"
            )


def end_ids(eos_ids: Sequence[int], stop_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Ids that end a row, each once."""
    return tuple(dict.fromkeys([*eos_ids, *(_stop_id("stop_ids", i, vocab_size) for i in stop_ids)]))


def _stop_id(name: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < vocab_size:
        raise ValueError(f"{name} must be token ids in 0..{vocab_size - 1}, got {value!r}")
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
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _measure(name: str, value: Any) -> int:
    if value not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {value!r}")
    return MEASURES.index(value)


def _int(name: str, value: Any, low: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return int(value)


def _positive_int(name: str, value: Any) -> int:
    return min(_int(name, value, 1, "an integer of at least 1"), 2**62)  # no model has that many positions


def _top_k(name: str, value: Any) -> int:
    return _int(name, value, 0, "an integer of at least 0 (0 keeps the whole vocabulary)")


def _seed(name: str, value: Any) -> int:
    if _int(name, value, 0, "an integer of at least 0") >= MAX_SEED:
        raise ValueError(f"seed must be below 2^32, got {value}")
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
