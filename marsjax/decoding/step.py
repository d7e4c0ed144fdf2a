"""The decode step: slots → one forward against a read-only cache → accept → commit.

`start`, `prefill` and `advance` are the only compiled programs: one each per (network, plan, rows, cache length).
Everything a request can ask for is data in `Controls`.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from marsjax.decoding import acceptance, sampling
from marsjax.decoding.cache import LayerCache, attend_cache_and_slots, commit, write_rows
from marsjax.decoding.plans import SlotPlan


class Network(Protocol):
    """What a step needs of a model; hashable, static under `jax.jit`. See `marsjax.decoding.network`."""

    def empty_cache(self, rows: int, length: int) -> list[LayerCache]: ...

    def forward(self, params: Any, tokens, positions, attend, cache) -> tuple[jax.Array, list[LayerCache]]:
        """tokens, positions [N, S] → hidden [N, S, ...] and the slots' keys and values."""

    def unembed(self, params: Any, hidden) -> jax.Array:
        """hidden [N, W, ...] → logits [N, W, V] float32."""


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
    limit: Any  # [N] int32, length at which the row ends: prompt + new tokens
    ends: Any  # [N, E] int32, ids that end the row; -1 fills up
    halted: Any  # [N] bool, the host ended the row (stop string, cancelled)
    allowed: Any  # [V] bool, ids that may be emitted
    mask_id: Any  # [] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A batch in the middle of decoding. Donated to every call: read what is wanted before the next one."""

    tokens: jax.Array  # [N, T] int32, prompt and emitted tokens by absolute position
    emitted_by: jax.Array  # [N, T] int32, the row's forward (from 1) that emitted the token; 0 in the prompt
    length: jax.Array  # [N] int32, tokens known
    cursor: jax.Array  # [N] int32, tokens whose keys and values are committed; length - cursor are pending
    forwards: jax.Array  # [N] int32, forwards of the row so far, prefill apart
    done: jax.Array  # [N] bool, ended by an end token or its limit
    cache: list[LayerCache]  # L × [N, K, T, h]


@functools.partial(jax.jit, static_argnames=("network",))
def start(network: Network, tokens: jax.Array, length: jax.Array) -> State:
    """A state that knows its prompts [N, T] (right-padded, `length` [N] of them real) and has committed nothing.

    It shares no buffer with the arguments, so that donating it takes nothing from the caller.
    """
    rows, capacity = tokens.shape
    zeros = jnp.zeros(rows, jnp.int32)
    return State(
        tokens=jnp.copy(tokens),
        emitted_by=jnp.zeros_like(tokens),
        length=jnp.copy(length),
        cursor=zeros,
        forwards=zeros,
        done=jnp.zeros(rows, bool),
        cache=network.empty_cache(rows, capacity),
    )


@functools.partial(jax.jit, static_argnames=("network", "chunk"), donate_argnames=("state",))
def prefill(network: Network, chunk: int, params: Any, state: State, max_chunks: jax.Array) -> State:
    """Commit all of every prompt but its last token, `chunk` tokens a forward, at most `max_chunks` (data) forwards.

    T must be a multiple of `chunk`. What lies past a prompt is written too, and seen by nobody.
    """
    slot = jnp.arange(chunk, dtype=jnp.int32)
    sees = slot[:, None] >= slot

    def more(carry):
        chunks, state = carry
        return (chunks < max_chunks) & (state.cursor < state.length - 1).any()

    def body(carry):
        chunks, state = carry
        rows = state.cursor.shape[0]
        positions = state.cursor[:, None] + slot
        tokens = jnp.take_along_axis(state.tokens, positions, 1, mode="clip")
        attend = attend_cache_and_slots(state.cursor, jnp.broadcast_to(sees, (rows, chunk, chunk)))
        _, slots = network.forward(params, tokens, positions, attend, state.cache)
        count = jnp.minimum(chunk, state.length - 1 - state.cursor)
        first = jnp.zeros(rows, jnp.int32)
        cache = commit(state.cache, slots, first, chunk, state.cursor, count > 0)
        return chunks + 1, dataclasses.replace(state, cache=cache, cursor=state.cursor + count)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, static_argnames=("network", "plan"), donate_argnames=("state",))
def advance(
    network: Network, plan: SlotPlan, params: Any, controls: Controls, state: State, max_steps: jax.Array
) -> State:
    """Take up to `max_steps` (data, not a constant) steps; fewer when every row has ended."""

    def more(carry):
        steps, state = carry
        return (steps < max_steps) & (~(state.done | controls.halted)).any()

    def body(carry):
        steps, state = carry
        return steps + 1, step(network, plan, params, controls, state)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


def step(network: Network, plan: SlotPlan, params: Any, controls: Controls, state: State) -> State:
    """One forward for every row that has not ended.

    Needs T ≥ cursor + P and T ≥ length + W in every row that has not ended, which holds when T ≥ limit + W - 1.
    """
    active = ~(state.done | controls.halted)
    pending = state.length - state.cursor

    hidden, slots = _forward(network, plan, params, controls, state, pending, active)
    logits = jnp.where(controls.allowed, network.unembed(params, hidden), -jnp.inf)
    chosen = sampling.choose(
        logits,
        state.length[:, None] + plan.depth[list(plan.heads)],
        temperature=controls.temperature,
        top_k=controls.top_k,
        top_p=controls.top_p,
        seed=controls.seed,
    )
    if plan.window > 1:
        sure = acceptance.confidence(logits, chosen, controls.measure)
        count = acceptance.accept(sure, controls.tau, controls.measure)
    else:
        count = jnp.ones_like(state.length)
    count = jnp.minimum(count, controls.limit - state.length)
    is_end = (chosen[..., None] == controls.ends[:, None]).any(-1) & (jnp.arange(plan.window) < count[:, None])
    stops = is_end.any(-1)
    count = jnp.where(active, jnp.where(stops, is_end.argmax(-1) + 1, count), 0)

    forwards = state.forwards + active
    length = state.length + count
    by = jnp.broadcast_to(forwards[:, None], chosen.shape)
    # Every active row accepts a token, so `count > 0` is `active`; but it comes out of the logits, so that writing the
    # cache depends on every layer having read it. Without that the compiler may write first, and then copies the cache.
    writes = count > 0
    return State(
        tokens=write_rows(state.tokens, chosen, state.length, writes),
        emitted_by=write_rows(state.emitted_by, by, state.length, writes),
        length=length,
        cursor=state.cursor + jnp.where(active, pending, 0),
        forwards=forwards,
        done=state.done | (active & (stops | (length >= controls.limit))),
        cache=commit(state.cache, slots, plan.pending - pending, plan.pending, state.cursor, writes),
    )


def _forward(network: Network, plan: SlotPlan, params, controls: Controls, state: State, pending, active):
    """(hidden rows of `plan.heads` [N, W, ...], all slots' keys and values).

    Where no row has more than one pending token (always at τ = 1) the slots of longer runs are not fed: P - 1 fewer,
    which matters where arithmetic and not memory bounds a step.
    """

    def run(plan: SlotPlan):
        positions = state.length[:, None] - 1 + plan.depth
        known = jnp.take_along_axis(state.tokens, jnp.maximum(positions, 0), 1, mode="clip")
        tokens = jnp.where(plan.is_mask, controls.mask_id, known)
        # The pending run is right-aligned: nobody sees the slots before it.
        unused = jnp.arange(plan.size) < (plan.pending - pending)[:, None]
        sees = jnp.asarray(plan.sees) & ~unused[:, None, :]
        attend = attend_cache_and_slots(state.cursor, sees)
        hidden, slots = network.forward(params, tokens, jnp.maximum(positions, 0), attend, state.cache)
        return hidden[:, jnp.asarray(plan.heads)], slots

    def run_short():
        hidden, slots = run(plan.with_pending(1))
        pad = ((0, 0), (0, 0), (plan.pending - 1, 0), (0, 0))
        return hidden, jax.tree.map(lambda x: jnp.pad(x, pad), slots)

    if plan.pending == 1:
        return run(plan)
    return jax.lax.cond(((pending <= 1) | ~active).all(), run_short, lambda: run(plan))
