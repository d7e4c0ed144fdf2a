"""The engine: requests wait in a queue, lanes of one compiled step answer them, a lane that ends is filled again.

`generate`, `stream`, batch files and servers are loops over `Engine.turn`. Everything a request asks for is data: once
warmed up, an engine compiles nothing.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from marsjax.decoding.answer import Answer
from marsjax.decoding.options import positive
from marsjax.decoding.requests import Spec, check_strategy, tau_rows
from marsjax.decoding.result import Chunk, FinishReason, Result
from marsjax.decoding.statistics import Statistics
from marsjax.decoding.step import (
    Controls,
    Network,
    Params,
    State,
    Strategy,
    admit,
    advance,
    clear_lane,
    prefill,
    prefill_lane,
    resize,
    start,
)

UNBOUNDED = np.int32(np.iinfo(np.int32).max)
STEPS_BETWEEN_STOP_CHECKS = 8


class QueueFull(RuntimeError):
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What all engines of one generator share."""

    network: Network
    params: Params
    strategy: Strategy
    prefill_chunk: int
    tokenizer: Any
    eos_ids: tuple[int, ...]
    mask_id: np.int32
    allowed: jax.Array  # [V] bool
    vocab_size: int
    max_positions: int


class Request:
    """One prompt being answered; made by `Engine.submit`.

    Attributes:
      result: when it has ended, else None. error: why it failed instead (NaN logits), else None.
    """

    def __init__(self, spec: Spec, tokenizer: Any):
        self.spec = spec
        self.tau = spec.tau
        self.answer = Answer(tokenizer, spec.stops, spec.ends)
        self.result: Result | None = None
        self.error: Exception | None = None
        self.seconds = self.prefill_seconds = 0.0
        self.forwards = 0
        self._text: list[str] = []
        self._taken = 0

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    def take(self) -> Chunk:
        """What has become final since the last call."""
        final = len(self.answer.ids) if self.ended else self.answer.final
        chunk = Chunk("".join(self._text), self.answer.ids[self._taken : final], self.result)
        self._text, self._taken = [], final
        return chunk


class Engine:
    """`lanes` rows of one plan, fed from a queue."""

    def __init__(self, runtime: Runtime, lanes: int, *, max_waiting: int | None = None):
        """
        Args:
          lanes: N, requests answered at a time. Programs are compiled for each (lanes, cache length).
          max_waiting: requests that may wait behind them; None: any number.
        """
        positive("lanes", lanes)
        if max_waiting is not None:
            positive("max_waiting", max_waiting)
        self._runtime, self._max_waiting = runtime, max_waiting
        self._lanes: list[Request | None] = [None] * lanes
        self._waiting: collections.deque[Request] = collections.deque()
        self._state: State | None = None
        self._seen = np.zeros(lanes, np.int64)  # tokens of each lane its answer knows
        self._steps = self._fed = 0  # of the state's counters, what the statistics have
        self._rows = _idle_rows(lanes)
        self._controls: Controls | None = None
        self._compiled: set[tuple[Any, ...]] = set()
        self.statistics = Statistics()

    # --- what users call -------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return [request for request in self._lanes if request is not None]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    def submit(self, spec: Spec) -> Request:
        """Put a checked request (`Generator.spec`) into the queue. Raises QueueFull."""
        if not isinstance(spec, Spec):
            raise TypeError(f"submit takes what Generator.spec(prompt, ...) makes, got {type(spec).__name__}")
        check_strategy(self._runtime.strategy, [spec.tau], [int(spec.measure)], [spec.rejection])
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests wait already; let turn() or run() answer some first")
        request = Request(spec, self._runtime.tokenizer)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, with what it has; nothing if it has ended. ValueError if it is another engine's."""
        if request.ended:
            return
        self._check_own(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._end(request, "cancelled")
        if self.idle:
            self._rest()

    def set_tau(self, tau: float | None, request: Request | None = None) -> None:
        """Change τ from the next step on, of one request or of all that wait or run."""
        if request is not None and not request.ended:
            self._check_own(request)
        requests = [*self.running, *self._waiting] if request is None else [request]
        taus = [tau_rows(tau, [int(r.spec.measure)])[0] for r in requests]
        check_strategy(self._runtime.strategy, taus, [int(r.spec.measure) for r in requests], [])
        for one, value in zip(requests, taus, strict=True):
            one.tau = value
            if one in self._lanes:
                self._set(self._lanes.index(one), tau=value)

    def turn(self, max_steps: int | None = None) -> list[Request]:
        """Fill free lanes, take up to `max_steps` steps (None: until a lane can be refilled, or all end).

        Returns the requests that were running. If anything fails or interrupts, those have failed, and the engine goes
        on with what waits.
        """
        if max_steps is not None:
            positive("max_steps", max_steps)
        try:
            return self._turn(max_steps)
        except BaseException as error:
            for lane, request in enumerate(self._lanes):
                if request is not None:
                    self._fail(lane, error if isinstance(error, Exception) else RuntimeError("interrupted"))
            self._state = None  # may have been donated to what failed
            raise

    def _turn(self, max_steps: int | None) -> list[Request]:
        began, before = time.perf_counter(), self._told_seconds
        self._admit()
        self._fit(self.running)
        running = self.running
        if running:
            steps = UNBOUNDED if max_steps is None else np.int32(max_steps)
            if any(request.spec.stops for request in running):
                # Stop strings are looked for here; who waits for a lane should not wait for that.
                steps = min(steps, np.int32(1 if self._waiting else STEPS_BETWEEN_STOP_CHECKS))
            self._advance(steps)
        if self.idle:
            self._rest()
        self.statistics.host_seconds += time.perf_counter() - began - (self._told_seconds - before)
        return running

    def run(self) -> None:
        """Until nothing waits or runs."""
        while not self.idle:
            self.turn()

    def stream(self, request: Request, steps: int = 1, *, tau: Callable[[], float] | None = None) -> Iterator[Chunk]:
        """A request's chunks, one a turn of up to `steps` forwards; other requests run along.

        `tau`, if given, is asked before each turn. A reader that leaves cancels the request.
        """
        if not request.ended:
            self._check_own(request)
        try:
            ended = False
            while not ended:
                if not request.ended:
                    if tau is not None:
                        self.set_tau(tau(), request)
                    self.turn(steps)
                if request.error is not None:
                    raise request.error
                ended = request.ended
                yield request.take()
        finally:
            self.cancel(request)

    def warm_up(self, longest: int) -> None:
        """Compile everything that requests of up to `longest` tokens (prompt + limit) can need, ahead of them.

        Seven programs for each cache length up to there. With jax's compilation cache a second start only reads them.
        """
        if positive("longest", longest) > (most := self._runtime.max_positions):
            raise ValueError(f"longest={longest} is beyond the model's {most} positions")
        if not self.idle:
            raise RuntimeError("an engine is warmed up before its first request")
        for length in (lengths := self._lengths(longest)):
            self._state = self._resized(length) if self._state is not None else self._started(length)
            nobody = np.zeros(len(self._lanes), bool)
            self._admitted(nobody, np.zeros(self._state.tokens.shape, np.int32), nobody.astype(np.int32))
            for lane in (None, 0):
                self._compile_prefill(lane)
            self._compile_advance()
            self._state = self._started(length)
        self._resized(lengths[0])
        self._state = None

    # --- lanes -------------------------------------------------------------------------------------------------------

    def _check_own(self, request: Request) -> None:
        if request not in self._lanes and request not in self._waiting:
            raise ValueError("the request is not one of this engine")

    @property
    def _told_seconds(self) -> float:
        sums = self.statistics
        return sums.decode_seconds + sums.prefill_seconds + sums.compile_seconds

    def _admit(self) -> None:
        """Waiting requests into free lanes, their prompts into the cache."""
        free = [lane for lane, request in enumerate(self._lanes) if request is None]
        if not free or not self._waiting:
            return
        before = self.statistics.prefill_seconds
        if not self.running:
            self._state = None  # before its successor is made
        new = list(zip(free, self._waiting, strict=False))
        try:
            self._fit([*self.running, *(request for _, request in new)])
        except Exception as error:  # no memory for the longest: the others are no worse off than before
            longest = max((request for _, request in new), key=lambda request: request.spec.needed)
            self._waiting.remove(longest)
            self._failed(longest, error)
            return
        for _ in new:
            self._waiting.popleft()
        is_new, lengths = np.zeros(len(self._lanes), bool), np.ones(len(self._lanes), np.int32)
        tokens = np.zeros((len(self._lanes), self._capacity), np.int32)
        for lane, request in new:
            ids = request.spec.prompt
            is_new[lane], lengths[lane], tokens[lane, : len(ids)] = True, len(ids), ids
            self._lanes[lane], self._seen[lane] = request, len(ids)
            self._set(lane, halted=False, limit=request.spec.needed, **request.spec.controls())
            self._set(lane, tau=request.tau)
        self._admitted(is_new, tokens, lengths)
        # All lanes at once when most are new, else one by one: what a forward of the prompt costs is its rows.
        together = 2 * len(new) >= len(self._lanes) or self._runtime.network.lane_groups > 1
        for which in [None] if together else [lane for lane, _ in new]:
            self._compile_prefill(which)
            started = time.perf_counter()
            self._state = self._prefill(which, UNBOUNDED)
            jax.block_until_ready(self._state.cursor)
            self.statistics.prefill_seconds += time.perf_counter() - started
        spent = self.statistics.prefill_seconds - before
        for _, request in new:
            request.prefill_seconds = spent
        self._compile_advance()

    def _fit(self, requests: list[Request]) -> None:
        """A cache as long as these need: attention reads all of it. Shrinks by half or more, or would go to and fro."""
        if not requests:
            return
        needed = self._lengths(max(request.spec.needed for request in requests))[-1]
        if self._state is None:
            self._state = self._started(needed)
        elif needed > self._capacity or 2 * needed <= self._capacity:
            self._state = self._resized(needed)

    def _advance(self, max_steps: np.int32) -> None:
        runtime, running = self._runtime, self.running
        began = time.perf_counter()
        # With a queue, stop as soon as a lane is free for it.
        least = np.int32(len(running) if self._waiting else 1)
        self._state = self._advanced(max_steps, least)
        report = (self._state.tokens, self._state.emitted_by, self._state.length, self._state.done)
        tokens, by, length, done = map(np.asarray, jax.device_get(report))
        steps, fed = int(self._state.steps), int(self._state.fed)
        seconds = time.perf_counter() - began
        took = (steps - self._steps) % 2**32
        self.statistics.decode_seconds += seconds
        self.statistics.steps += took
        self.statistics.slots += (fed - self._fed) % 2**32 * len(self._lanes)  # the device counts in 32 bits
        self.statistics.head_rows += took * runtime.strategy.plan.head_rows * len(self._lanes)
        self._steps, self._fed = steps, fed
        for lane, request in enumerate(self._lanes):
            if request is None:
                continue
            forwards = int(by[lane, length[lane] - 1])
            request.seconds += seconds * (forwards - request.forwards) / max(1, took)
            request.forwards = forwards
            new = slice(self._seen[lane], length[lane])
            if (tokens[lane, new] >= runtime.vocab_size).any():  # what an arg-max over NaN gives
                told = f"the logits are NaN from token {self._seen[lane]} on; check the weights, and the dtype"
                self._fail(lane, FloatingPointError(told))
                # 0 times NaN is NaN: in the cache it would outlive the request.
                self._state = clear_lane(self._state, np.int32(lane))
                continue
            request._text.append(request.answer.push(tokens[lane, new].tolist(), by[lane, new].tolist()))
            self._seen[lane] = length[lane]
            if request.answer.stop is not None:
                self._end(request, "stop")
            elif done[lane]:
                request._text.append(request.answer.finish())
                self._end(request, "length" if request.answer.stop is None else "stop")

    def _end(self, request: Request, reason: FinishReason) -> None:
        answer, spec, sums = request.answer, request.spec, self.statistics
        if reason == "cancelled":
            request._text.append(answer.finish())
            sums.cancelled += 1
        request.result = Result(
            text=answer.text,
            ids=answer.ids,
            prompt_ids=spec.prompt,
            finish_reason=reason,
            stop=answer.stop,
            chunks=answer.chunks,
            seed=int(spec.seed),
            forwards=answer.forwards,
            draft_forwards=answer.forwards * self._runtime.strategy.proposer.draft_forwards,
            seconds=request.seconds,
            prefill_seconds=request.prefill_seconds,
        )
        sums.requests += 1
        sums.prompt_tokens += len(spec.prompt)
        sums.new_tokens += len(answer.ids)
        sums.forwards += request.result.forwards
        sums.draft_forwards += request.result.draft_forwards
        sums.runs.update(request.result.chunks)
        if request in self._lanes:
            self._free(self._lanes.index(request))

    def _fail(self, lane: int, error: Exception) -> None:
        request = self._lanes[lane]
        assert request is not None
        self._failed(request, error)
        self._free(lane)

    def _failed(self, request: Request, error: Exception) -> None:
        request.error = error
        self.statistics.requests += 1
        self.statistics.failed += 1

    def _free(self, lane: int) -> None:
        self._lanes[lane] = None
        for name, idle in _idle_rows(1).items():  # or a greedy batch would go on paying for a sampled row's noise
            self._set(lane, **{name: idle[0]})

    def _rest(self) -> None:
        """Gives the memory back; the next request chooses the cache length anew."""
        self._state, self._rows, self._controls = None, _idle_rows(len(self._lanes)), None

    def _set(self, lane: int, **values: Any) -> None:
        for name, value in values.items():
            if name == "ends":
                width = self._rows["ends"].shape[1]
                if len(value) > width:  # more ends than ever before: another program
                    wider = np.full((len(self._lanes), 1 << (len(value) - 1).bit_length()), -1, np.int32)
                    wider[:, :width] = self._rows["ends"]
                    self._rows["ends"] = wider
                value = np.pad(value, (0, self._rows["ends"].shape[1] - len(value)), constant_values=-1)
            self._rows[name][lane] = value
        self._controls = None

    # --- programs: each is first run with nothing to do, so that no time that is told contains its compilation -------

    @property
    def _capacity(self) -> int:
        assert self._state is not None
        return self._state.tokens.shape[1]

    def _lengths(self, needed: int) -> list[int]:
        """Cache lengths from the shortest to the one for requests of `needed` tokens (prompt + limit)."""
        limit, needed = self._runtime.prefill_chunk, needed + self._runtime.strategy.slack
        lengths = [cache_length(1, limit)[0]]
        while lengths[-1] < needed:
            lengths.append(cache_length(lengths[-1] + 1, limit)[0])
        return lengths

    @contextlib.contextmanager
    def _compiling(self, program: str, capacity: int, *key: Any) -> Iterator[bool]:
        """Whether this is the first call of a program, which compiles; its time is told apart."""
        key = (program, capacity, self._rows["ends"].shape[1], *key)
        first, began = key not in self._compiled, time.perf_counter()
        yield first
        self._compiled.add(key)
        if first:
            self.statistics.compile_seconds += time.perf_counter() - began

    def _started(self, length: int) -> State:
        self._steps = self._fed = 0
        runtime = self._runtime
        with self._compiling("start", length):
            state = start(runtime.network, runtime.strategy, len(self._lanes), length)
            # Beside the weights from the start: if it only arrived there with the first call, that would compile twice.
            return jax.device_put(state, runtime.network.state_sharding(runtime.params.target, state))

    def _resized(self, length: int) -> State:
        """A cache of another length, bucket by bucket, so that the programs that do it are few."""
        assert self._state is not None
        lengths = self._lengths(max(length, self._capacity) - self._runtime.strategy.slack)
        here, there = lengths.index(self._capacity), lengths.index(length)
        for at in range(here + 1, there + 1) if there > here else reversed(range(there, here)):
            with self._compiling("resize", self._capacity, lengths[at]):
                self._state = resize(self._runtime.strategy, self._state, lengths[at])
        return self._state

    def _admitted(self, new: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
        with self._compiling("admit", self._capacity):
            self._state = admit(self._runtime.strategy, self._state, new, tokens, lengths)

    def _compile_prefill(self, lane: int | None) -> None:
        with self._compiling("prefill", self._capacity, lane is None) as first:
            if first:
                self._state = jax.block_until_ready(self._prefill(lane, np.int32(0)))

    def _compile_advance(self) -> None:
        with self._compiling("advance", self._capacity) as first:
            if first:
                self._state = jax.block_until_ready(self._advanced(np.int32(0), np.int32(1)))

    def _prefill(self, lane: int | None, max_chunks: np.int32) -> State:
        runtime = self._runtime
        chunk = cache_length(self._capacity, runtime.prefill_chunk)[1]
        if lane is None:
            return prefill(runtime.network, runtime.strategy, chunk, runtime.params, self._state, max_chunks)
        at = np.int32(lane)
        return prefill_lane(runtime.network, runtime.strategy, chunk, runtime.params, self._state, at, max_chunks)

    def _advanced(self, max_steps: np.int32, least: np.int32) -> State:
        runtime = self._runtime
        if self._controls is None:
            rows = {name: value.copy() for name, value in self._rows.items()}  # jax may read a numpy array later
            self._controls = Controls(**rows, allowed=runtime.allowed, mask_id=runtime.mask_id)
        return advance(runtime.network, runtime.strategy, runtime.params, self._controls, self._state, max_steps, least)


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


def run_all(engine: Engine, specs: Iterable[Spec]) -> list[Result]:
    """Results of many requests, in their order."""
    requests: Sequence[Request] = [engine.submit(spec) for spec in specs]
    engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    results = [request.result for request in requests]
    assert None not in results
    return results  # type: ignore[return-value]


def _idle_rows(lanes: int) -> dict[str, np.ndarray]:
    return {
        "tau": np.ones(lanes, np.float32),
        "measure": np.zeros(lanes, np.int32),
        "temperature": np.zeros(lanes, np.float32),
        "top_k": np.zeros(lanes, np.int32),
        "top_p": np.ones(lanes, np.float32),
        "seed": np.zeros(lanes, np.uint32),
        "rejection": np.zeros(lanes, bool),
        "limit": np.zeros(lanes, np.int32),
        "ends": np.full((lanes, 8), -1, np.int32),
        "halted": np.ones(lanes, bool),
    }
