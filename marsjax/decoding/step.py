"""The decode step: slots → one forward against a read-only cache → accept → commit → propose.

The compiled programs: `start`, `admit`, `prefill`, `prefill_lane` and `advance`, one each per (network, plan, lanes,
cache length), and `grow` from each cache length to the next. Everything a request can ask for is data in `Controls`.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from marsjax.decoding import acceptance, drafts, sampling
from marsjax.decoding.cache import LayerCache, attend_cache_and_slots
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.plans import SlotPlan


class Network(Protocol):
    """What a step needs of a model; hashable, static under `jax.jit`. See `marsjax.decoding.network`."""

    @property
    def lane_groups(self) -> int:
        """The number of lanes must be a multiple of this."""

    @property
    def short_steps(self) -> bool:
        """Whether steps should leave out the slots of longer pending runs where no row has one."""

    def empty_cache(self, rows: int, length: int) -> list[LayerCache]: ...

    def forward(self, params: Any, tokens, positions, attend, cache) -> tuple[jax.Array, list[LayerCache]]:
        """tokens, positions [N, S] → hidden [N, S, ...] and the slots' keys and values."""

    def unembed(self, params: Any, hidden) -> jax.Array:
        """hidden [N, W, ...] → logits [N, W, V] float32."""

    def commit(self, cache, slots, first, entries, cursor, writes) -> list[LayerCache]:
        """`marsjax.decoding.cache.commit`, where the lanes lie."""

    def write_rows(self, old, new, start, writes) -> jax.Array:
        """`marsjax.decoding.cache.write_rows`, where the lanes lie."""

    def state_sharding(self, params: Any, state: Any) -> Any:
        """Where the arrays of a state go."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """What a batch was asked for, numpy or jax arrays. Never donated; replacing a value compiles nothing."""

    tau: Any  # [N] float32
    measure: Any  # [N] int32, see acceptance
    temperature: Any  # [N] float32, 0 = greedy
    top_k: Any  # [N] int32, 0 = all
    top_p: Any  # [N] float32, 1 = all
    seed: Any  # [N] uint32
    rejection: Any  # [N] bool, verify sampled drafts by rejection instead of by the position's own noise
    limit: Any  # [N] int32, length at which the row ends: prompt + new tokens
    ends: Any  # [N, E] int32, ids that end the row; -1 fills up
    halted: Any  # [N] bool, the host ended the row (stop string, cancelled)
    allowed: Any  # [V] bool, ids that may be emitted
    mask_id: Any  # [] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """N lanes in the middle of decoding. Donated to every call: read what is wanted before the next one."""

    tokens: jax.Array  # [N, T] int32, prompt and emitted tokens by absolute position
    emitted_by: jax.Array  # [N, T] int32, the row's forward (from 1) that emitted the token; 0 in the prompt
    prompt: jax.Array  # [N] int32, tokens of the prompt
    length: jax.Array  # [N] int32, tokens known
    cursor: jax.Array  # [N] int32, tokens whose keys and values are committed; length - cursor are pending
    forwards: jax.Array  # [N] int32, forwards of the row so far, prefill apart
    done: jax.Array  # [N] bool, ended by an end token or its limit
    cache: list[LayerCache]  # L × [N, K, T, h]
    drafts: Drafts  # for the next step to verify
    steps: jax.Array  # [] int32, steps since the start
    fed: jax.Array  # [] int32, slots fed by them, a lane


@functools.partial(jax.jit, static_argnames=("network", "plan", "lanes", "capacity"))
def start(network: Network, plan: SlotPlan, lanes: int, capacity: int) -> State:
    """N lanes that have all ended, with room for T tokens."""
    table = jnp.zeros((lanes, capacity), jnp.int32)
    one = jnp.ones(lanes, jnp.int32)
    zero = jnp.int32(0)
    return State(
        tokens=table,
        emitted_by=table,
        prompt=one,
        length=one,
        cursor=0 * one,
        forwards=0 * one,
        done=one > 0,
        cache=network.empty_cache(lanes, capacity),
        drafts=drafts.none(lanes, plan.drafts),
        steps=zero,
        fed=zero,
    )


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def admit(plan: SlotPlan, state: State, new: jax.Array, tokens: jax.Array, length: jax.Array) -> State:
    """Lanes `new` [N] bool start over with prompts `tokens` [N, T], right-padded, `length` [N] of them real."""
    lanes, rows = new.shape[0], new[:, None]
    void = drafts.none(lanes, plan.drafts)

    def fresh(value, old):
        return jnp.where(new.reshape(lanes, *(1,) * (old.ndim - 1)), value, old)

    return dataclasses.replace(
        state,
        tokens=jnp.where(rows, tokens, state.tokens),
        emitted_by=jnp.where(rows, 0, state.emitted_by),
        prompt=fresh(length, state.prompt),
        length=fresh(length, state.length),
        cursor=fresh(0, state.cursor),
        forwards=fresh(0, state.forwards),
        done=state.done & ~new,
        drafts=jax.tree.map(fresh, void, state.drafts),
    )


@functools.partial(jax.jit, static_argnames=("network", "chunk"), donate_argnames=("state",))
def prefill(network: Network, chunk: int, params: Any, state: State, max_chunks: jax.Array) -> State:
    """Commit all of every prompt but its last token, `chunk` tokens a forward, at most `max_chunks` (data) forwards.

    T must be a multiple of `chunk`. What lies past a prompt is written too, and seen by nobody.
    """
    return _prefill(network, chunk, params, state, max_chunks)


@functools.partial(jax.jit, static_argnames=("network", "chunk"), donate_argnames=("state",))
def prefill_lane(
    network: Network, chunk: int, params: Any, state: State, lane: jax.Array, max_chunks: jax.Array
) -> State:
    """`prefill` of one lane (data) alone."""
    lanes = state.length.shape[0]

    def of_lane(x):
        return jax.lax.dynamic_slice_in_dim(x, lane, 1) if x.ndim and x.shape[0] == lanes else x

    one = _prefill(network, chunk, params, jax.tree.map(of_lane, state), max_chunks)
    cache = jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, lane, 0), state.cache, one.cache
    )
    cursor = jax.lax.dynamic_update_slice_in_dim(state.cursor, one.cursor, lane, 0)
    return dataclasses.replace(state, cache=cache, cursor=cursor)


def _prefill(network: Network, chunk: int, params: Any, state: State, max_chunks: jax.Array) -> State:
    slot = jnp.arange(chunk, dtype=jnp.int32)
    sees = slot[:, None] >= slot

    def missing(state):
        return jnp.clip(state.prompt - 1 - state.cursor, 0, chunk)

    def more(carry):
        chunks, state = carry
        return (chunks < max_chunks) & (missing(state) > 0).any()

    def body(carry):
        chunks, state = carry
        rows = state.cursor.shape[0]
        positions = state.cursor[:, None] + slot
        tokens = jnp.take_along_axis(state.tokens, positions, 1, mode="clip")
        attend = attend_cache_and_slots(state.cursor, jnp.broadcast_to(sees, (rows, chunk, chunk)))
        _, slots = network.forward(params, tokens, positions, attend, state.cache)
        count = missing(state)
        first = jnp.zeros(rows, jnp.int32)
        cache = network.commit(state.cache, slots, first, chunk, state.cursor, count > 0)
        return chunks + 1, dataclasses.replace(state, cache=cache, cursor=state.cursor + count)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, donate_argnames=("state",))
def clear_lane(state: State, lane: jax.Array) -> State:
    """Zeros in the cache of a lane (data), for one that was left with NaN."""
    return dataclasses.replace(state, cache=jax.tree.map(lambda x: x.at[lane].set(0), state.cache))


@functools.partial(jax.jit, static_argnames=("capacity",))
def grow(state: State, capacity: int) -> State:
    """The same lanes with room for `capacity` tokens."""
    more = capacity - state.tokens.shape[1]

    def longer(x, axis):
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])

    return dataclasses.replace(
        state,
        tokens=longer(state.tokens, 1),
        emitted_by=longer(state.emitted_by, 1),
        cache=jax.tree.map(lambda x: longer(x, 2), state.cache),
    )


@functools.partial(jax.jit, static_argnames=("network", "plan"), donate_argnames=("state",))
def advance(
    network: Network,
    plan: SlotPlan,
    params: Any,
    controls: Controls,
    state: State,
    max_steps: jax.Array,
    least: jax.Array,
) -> State:
    """Take up to `max_steps` steps; fewer when not even `least` lanes go on (both data, not constants)."""

    def more(carry):
        steps, state = carry
        return (steps < max_steps) & ((~(state.done | controls.halted)).sum() >= least)

    def body(carry):
        steps, state = carry
        return steps + 1, step(network, plan, params, controls, state)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


def step(network: Network, plan: SlotPlan, params: Any, controls: Controls, state: State) -> State:
    """One forward for every row that has not ended.

    Needs T ≥ length + max(plan.window, plan.commits) in every row that has not ended, which holds when T ≥ limit +
    `slack(plan)`.
    """
    active = ~(state.done | controls.halted)
    pending = state.length - state.cursor

    def logits_of(hidden):
        return jnp.where(controls.allowed, network.unembed(params, hidden), -jnp.inf)

    hidden, slots, fed = _forward(network, plan, params, controls, state, pending, active)
    logits = logits_of(hidden[:, jnp.asarray(plan.heads)])
    positions = state.length[:, None] + plan.depth[list(plan.heads)]
    emitted = sampling.choose(logits, positions, **_sampling(controls))
    if plan.drafts:
        emitted, accepted = _verify(plan, controls, state.drafts, logits, emitted, positions)
        count = accepted + 1
    elif plan.window > 1:
        sure = acceptance.confidence(logits, emitted, controls.measure)
        count = acceptance.accept(sure, controls.tau, controls.measure)
    else:
        count = jnp.ones_like(state.length)
    count = jnp.minimum(count, controls.limit - state.length)
    is_end = (emitted[..., None] == controls.ends[:, None]).any(-1) & (jnp.arange(plan.window) < count[:, None])
    stops = is_end.any(-1)
    count = jnp.where(active, jnp.where(stops, is_end.argmax(-1) + 1, count), 0)

    forwards = state.forwards + active
    length = state.length + count
    by = jnp.broadcast_to(forwards[:, None], emitted.shape)
    # Accepted drafts were fed, so their keys and values are there; other emitted tokens are pending in the next step.
    committed = pending + jnp.where(plan.drafts > 0, count - 1, 0)
    # Every active row accepts a token, so `count > 0` is `active`; but it comes out of the logits, so that writing the
    # cache depends on every layer having read it. Without that the compiler may write first, and then copies the cache.
    writes = count > 0
    return State(
        tokens=network.write_rows(state.tokens, emitted, state.length, writes),
        emitted_by=network.write_rows(state.emitted_by, by, state.length, writes),
        prompt=state.prompt,
        length=length,
        cursor=state.cursor + jnp.where(active, committed, 0),
        forwards=forwards,
        done=state.done | (active & (stops | (length >= controls.limit))),
        cache=network.commit(state.cache, slots, plan.pending - pending, plan.commits, state.cursor, writes),
        drafts=(
            drafts.from_masks(plan, controls, state.drafts, hidden, accepted, length, logits_of)
            if plan.drafts
            else state.drafts
        ),
        steps=state.steps + 1,
        fed=state.fed + fed,
    )


def slack(plan: SlotPlan) -> int:
    """Entries a cache and token table need beyond the longest row's limit: a step's writes are slices of fixed size."""
    return max(plan.window, plan.commits) - 1


def _sampling(controls: Controls) -> dict[str, Any]:
    return {name: getattr(controls, name) for name in ("temperature", "top_k", "top_p", "seed")}


def _verify(plan: SlotPlan, controls: Controls, guesses: Drafts, logits, own, positions):
    """(emitted tokens [N, k + 1], accepted drafts [N]); `own` [N, k + 1] is what the model itself chooses."""
    present = jnp.arange(plan.drafts) < guesses.count[:, None]
    equal = guesses.tokens == own[:, :-1]
    rejects = controls.rejection & (controls.temperature > 0)

    def with_rejection():
        accept, instead = sampling.reject(logits[:, :-1], positions[:, :-1], guesses.tokens, **_sampling(controls))
        accept, instead = (
            jnp.where(rejects[:, None] & present, x, y) for x, y in ((accept, equal), (instead, own[:, :-1]))
        )
        return accept, jnp.concatenate([instead, own[:, -1:]], axis=1)

    accept, own = jax.lax.cond(rejects.any(), with_rejection, lambda: (equal, own))
    sure = acceptance.is_sure(guesses.confidence, controls.tau, controls.measure)
    sure = jnp.cumprod(sure, axis=1).astype(bool)  # and all before it
    return acceptance.verify(own, guesses.tokens, (accept | sure) & present)


def _forward(network: Network, plan: SlotPlan, params, controls: Controls, state: State, pending, active):
    """(hidden rows [N, S, ...], keys and values) of all slots, and how many were really fed.

    With `network.short_steps`, where no row has more than one pending token (always at τ = 1) the slots of longer runs
    are not fed: P - 1 fewer, which matters where arithmetic and not memory bounds a step.
    """

    def run(plan: SlotPlan):
        # Absent slots are seen by nobody: the pending run is right-aligned, and there may be fewer drafts than slots.
        slot = jnp.arange(plan.size)
        first, last = (plan.pending - pending)[:, None], (plan.pending + state.drafts.count)[:, None]
        present = (slot >= first) & ((slot < last) | plan.is_mask)
        sees = plan.sees & present[:, None, :]
        # A slot's position counts the slots it sees from the root on.
        depth = (sees & (slot > plan.root)).sum(-1) if plan.drafts else plan.depth
        positions = jnp.maximum(state.length[:, None] - 1 + jnp.where(slot <= plan.root, plan.depth, depth), 0)
        known = jnp.take_along_axis(state.tokens, positions[:, : plan.pending], 1, mode="clip")
        masks = jnp.full((known.shape[0], plan.size - plan.commits), controls.mask_id, known.dtype)
        tokens = jnp.concatenate([known, state.drafts.tokens, masks], axis=1)
        attend = attend_cache_and_slots(state.cursor, sees)
        return *network.forward(params, tokens, positions, attend, state.cache), jnp.int32(plan.size)

    def run_short():
        hidden, slots, fed = run(plan.with_pending(1))
        cut = plan.pending - 1
        return _pad(hidden, cut, 1), jax.tree.map(lambda x: _pad(x, cut, 2), slots), fed

    if plan.pending == 1 or not network.short_steps:
        return run(plan)
    return jax.lax.cond(((pending <= 1) | ~active).all(), run_short, lambda: run(plan))


def _pad(x: jax.Array, before: int, axis: int) -> jax.Array:
    return jnp.pad(x, [(before if i == axis else 0, 0) for i in range(x.ndim)])
