"""One batch from its prompts to its results: the host's side of `marsjax.decoding.step`."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from marsjax.decoding import requests
from marsjax.decoding.answer import Answer
from marsjax.decoding.plans import SlotPlan
from marsjax.decoding.result import Result
from marsjax.decoding.step import Controls, Network, advance, prefill, start

UNBOUNDED = np.int32(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class Engine:
    """What all batches of one generator share."""

    network: Network
    params: Any
    plan: SlotPlan
    prefill_chunk: int
    tokenizer: Any
    eos_ids: tuple[int, ...]
    mask_id: np.int32
    allowed: jax.Array  # [V] bool
    vocab_size: int
    max_positions: int

    @property
    def device(self) -> Any:
        """Where a batch's state lives: with the weights, and whole on each device if those are spread out."""
        for weight in self.params:
            sharding = getattr(weight, "sharding", None)
            if isinstance(sharding, NamedSharding):
                return NamedSharding(sharding.mesh, PartitionSpec())
            if sharding is not None:
                return sharding
        return jax.local_devices()[0]


def cache_length(needed: int, chunk_limit: int) -> tuple[int, int]:
    """(cache length, prompt tokens a forward) for a cache of `needed` entries.

    Lengths come in buckets: 64, 96, 128, 192, 256, 384 ..., two an octave, so that there are few programs and attention
    reads at most half more than it must. Prompts are committed a quarter of that at a time, at most `chunk_limit`: a
    short prompt in a long chunk would be mostly padding.
    """
    bucket = 64
    while bucket < needed:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    chunk = min(chunk_limit, bucket // 4)
    return -(-bucket // chunk) * chunk, chunk


class Batch:
    """N prompts being answered. Compiles (on a shape's first use) and prefills when made; then `advance` until `over`.

    Options are those of `Generator.generate`.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[list[int]],
        *,
        stop: str | Sequence[str],
        stop_ids: Sequence[int],
        ignore_eos: bool,
        **options: Any,
    ):
        self._engine, self._prompts = engine, prompt_ids
        self.stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if self.stops and engine.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this generator has none; use stop_ids")
        ends = requests.end_ids(() if ignore_eos else engine.eos_ids, stop_ids, engine.vocab_size)
        self.answers = [Answer(engine.tokenizer, self.stops, ends) for _ in prompt_ids]
        self._options = requests.check_options(len(prompt_ids), **options)
        requests.check_lengths(prompt_ids, self._options.max_new_tokens, engine.max_positions)
        if engine.plan.window == 1:
            requests.check_no_threshold(self._options)
        self._controls = self._make_controls(ends)
        self._seen = np.asarray([len(ids) for ids in prompt_ids])  # tokens of each row the answers know
        self._done = np.zeros(len(prompt_ids), bool)
        self.seconds = 0.0
        self._prefill()

    @property
    def over(self) -> bool:
        return bool(self._done.all())

    def set_tau(self, tau: float | Sequence[float] | None) -> None:
        """Change τ from the next step on."""
        self._options.tau[:] = requests.tau_rows(tau, self._options.measure)
        self._controls = dataclasses.replace(self._controls, tau=self._options.tau.copy())

    def advance(self, max_steps: int | None = None) -> list[str]:
        """Take up to `max_steps` steps (None: until every row has ended); returns the text each row gained."""
        began = time.perf_counter()
        steps = UNBOUNDED if max_steps is None else np.int32(max_steps)
        self._state = self._advance(steps)
        tokens, by, length, done = map(np.array, self._report())
        self.seconds += time.perf_counter() - began
        gained = [""] * len(self.answers)
        for row, answer in enumerate(self.answers):
            if self._done[row]:
                continue
            new = slice(self._seen[row], length[row])
            if (tokens[row, new] >= self._engine.vocab_size).any():  # what an arg-max over NaN gives
                raise FloatingPointError(
                    f"row {row}: the logits are NaN from token {self._seen[row]} on; check the weights, and the dtype"
                )
            gained[row] = answer.push(tokens[row, new].tolist(), by[row, new].tolist())
            self._seen[row] = length[row]
            if done[row] and answer.stop is None:
                gained[row] += answer.finish()
            self._done[row] = done[row] or answer.stop is not None
        if (halted := self._done & ~done).any():
            self._controls = dataclasses.replace(self._controls, halted=halted)
        return gained

    def results(self) -> list[Result]:
        return [
            Result(
                text=answer.text,
                ids=answer.ids,
                prompt_ids=prompt,
                finish_reason="length" if answer.stop is None else "stop",
                stop=answer.stop,
                chunks=answer.chunks,
                seed=int(seed),
                seconds=self.seconds,
                prefill_seconds=self.prefill_seconds,
            )
            for answer, prompt, seed in zip(self.answers, self._prompts, self._options.seed, strict=True)
        ]

    def _make_controls(self, ends: Sequence[int]) -> Controls:
        options, rows = self._options, len(self._prompts)
        width = max(8, 1 << (len(ends) - 1).bit_length()) if ends else 8  # more ends must not mean another program
        lengths = np.asarray([len(ids) for ids in self._prompts])
        return Controls(
            tau=options.tau.copy(),
            measure=options.measure,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            limit=(lengths + options.max_new_tokens).astype(np.int32),
            ends=np.tile(np.asarray([*ends] + [-1] * (width - len(ends)), np.int32), (rows, 1)),
            halted=np.zeros(rows, bool),
            allowed=self._engine.allowed,
            mask_id=self._engine.mask_id,
        )

    def _prefill(self) -> None:
        engine, lengths = self._engine, self._seen.astype(np.int32)
        # A step may write W entries from one below the limit on.
        needed = int(self._controls.limit.max()) + engine.plan.window - 1
        capacity, chunk = cache_length(needed, engine.prefill_chunk)
        tokens = np.zeros((len(lengths), capacity), np.int32)
        for row, ids in zip(tokens, self._prompts, strict=True):
            row[: len(ids)] = ids
        # Beside the weights from the start: a state that only arrives there with the first call would compile twice.
        self._state = jax.device_put(start(engine.network, tokens, lengths), engine.device)
        # Without steps to take both programs only get compiled, so that no time below contains it.
        self._state = prefill(engine.network, chunk, engine.params, self._state, np.int32(0))
        self._state = jax.block_until_ready(self._advance(np.int32(0)))
        began = time.perf_counter()
        self._state = prefill(engine.network, chunk, engine.params, self._state, UNBOUNDED)
        jax.block_until_ready(self._state.cursor)
        self.prefill_seconds = time.perf_counter() - began

    def _advance(self, steps: np.int32):
        engine = self._engine
        return advance(engine.network, engine.plan, engine.params, self._controls, self._state, steps)

    def _report(self):
        return self._state.tokens, self._state.emitted_by, self._state.length, self._state.done
