"""The decode step: slots → one forward against a read-only cache → accept → commit → propose.

The compiled programs: `start`, `admit`, `prefill`, `prefill_lane` and `advance`, one each per (network, strategy,
lanes, cache length), and `resize` from each cache length to its neighbours. Everything a request can ask for is data in
`Controls`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from marsjax.decoding import acceptance, sampling
from marsjax.decoding.cache import LayerCache, attend_cache_and_slots
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.plans import SlotPlan
from marsjax.decoding.proposers.base import Proposer, Seen


class Network(Protocol):
    """What a step needs of a model; hashable, static under `jax.jit`. See `marsjax.decoding.network`."""

    @property
    def lane_groups(self) -> int:
        """The number of lanes must be a multiple of this."""

    @property
    def short_steps(self) -> bool:
        """Whether steps should leave out the slots of longer pending runs where no row has one."""

    def empty_cache(self, rows: int, length: int) -> list[LayerCache]: ...

    def forward(
        self, params: Any, tokens, positions, attend, cache, masks: "MaskSlots | None" = None
    ) -> tuple[jax.Array, list[LayerCache]]:
        """tokens, positions [N, S] → hidden [N, S, ...] and the slots' keys and values. masks: None if none are fed."""

    def embed(self, params: Any, tokens) -> jax.Array:
        """Input embeddings [..., D] float32 of tokens [...]."""

    def unembed(self, params: Any, hidden) -> jax.Array:
        """hidden [N, W, ...] → logits [N, W, V] float32."""

    def sample(self, params: Any, before, hidden) -> jax.Array:
        """The sampler head: tokens before [N] and masks' hidden rows [N, D] → hidden rows [N, D]."""

    def unembed_some(self, params: Any, hidden, ids) -> jax.Array:
        """hidden [N, D], ids [N, C] → the logits [N, C] of these ids alone, float32."""

    def commit(self, cache, slots, first, entries, cursor, writes) -> list[LayerCache]:
        """`marsjax.decoding.cache.commit`, where the lanes lie."""

    def write_rows(self, old, new, start, writes) -> jax.Array:
        """`marsjax.decoding.cache.write_rows`, where the lanes lie."""

    def state_sharding(self, params: Any, state: Any) -> Any:
        """Where the arrays of a state go."""


@dataclasses.dataclass(frozen=True)
class MaskSlots:
    """Which slots of a forward are masks: its last M, or those of them where `open` says so.

    A gated adapter acts there and nowhere else. What they are: `vectors`, if given; else the model's own embeddings of
    masks by `ranks`, if it has such; else their tokens.
    """

    ranks: Any  # [M] or [N, M] int32, masks between each and the token before it
    vectors: Any = None  # [N, M, D]
    open: Any = None  # [N, M] bool; None: all

    @property
    def count(self) -> int:
        """M."""
        return self.ranks.shape[-1]


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
    proposer: Any  # what the proposer knows
    steps: jax.Array  # [] int32, steps since the start
    fed: jax.Array  # [] int32, slots fed by them, a lane


NO_PROPOSER = Proposer()


class Params(NamedTuple):
    target: Any  # of the network
    proposer: Any  # of the strategy's proposer


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A slot plan and who proposes its drafts; static under `jax.jit`."""

    plan: SlotPlan
    proposer: Proposer = NO_PROPOSER
    block_size = 1  # tokens that see each other both ways

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def takes_tau(self) -> bool:
        """Whether a τ below 1 changes anything."""
        return self.plan.asks > 0

    @property
    def slack(self) -> int:
        """Entries a cache and token table need beyond the longest row's limit: writes are slices of fixed size."""
        return max(self.plan.window - 1, self.plan.commits - 1, self.proposer.slack)

    def step(self, network: Network, params: Params, controls: Controls, state: State) -> State:
        return step_and_logits(network, self, params, controls, state)[0]


@functools.partial(jax.jit, static_argnames=("network", "strategy", "lanes", "capacity"))
def start(network: Network, strategy: Strategy, lanes: int, capacity: int) -> State:
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
        proposer=strategy.proposer.start(lanes, capacity),
        steps=zero,
        fed=zero,
    )


@functools.partial(jax.jit, static_argnames=("strategy",), donate_argnames=("state",))
def admit(strategy: Strategy, state: State, new: jax.Array, tokens: jax.Array, length: jax.Array) -> State:
    """Lanes `new` [N] bool start over with prompts `tokens` [N, T], right-padded, `length` [N] of them real."""
    lanes, rows = new.shape[0], new[:, None]

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
        proposer=strategy.proposer.admit(state.proposer, new),
    )


@functools.partial(jax.jit, static_argnames=("network", "strategy", "chunk"), donate_argnames=("state",))
def prefill(
    network: Network, strategy: Strategy, chunk: int, params: Params, state: State, max_chunks: jax.Array
) -> State:
    """Commit all of every prompt but its last token (block diffusion: but its last whole block and what follows),
    `chunk` tokens a forward, at most `max_chunks` (data) forwards.

    T must be a multiple of `chunk`. What lies past a prompt is written too, and seen by nobody.
    """
    return _prefill(network, strategy, chunk, params, state, max_chunks)


@functools.partial(jax.jit, static_argnames=("network", "strategy", "chunk"), donate_argnames=("state",))
def prefill_lane(
    network: Network,
    strategy: Strategy,
    chunk: int,
    params: Params,
    state: State,
    lane: jax.Array,
    max_chunks: jax.Array,
) -> State:
    """`prefill` of one lane (data) alone."""
    lanes = state.length.shape[0]

    def of_lane(x):
        return jax.lax.dynamic_slice_in_dim(x, lane, 1) if x.ndim and x.shape[0] == lanes else x

    def put_back(old, new):
        return jax.lax.dynamic_update_slice_in_dim(old, new, lane, 0) if old.ndim and old.shape[0] == lanes else old

    one = _prefill(network, strategy, chunk, params, jax.tree.map(of_lane, state), max_chunks)
    return jax.tree.map(put_back, state, one)


def _prefill(network, strategy, chunk, params, state, max_chunks) -> State:
    state = prefill_prompts(network, chunk, params.target, state, max_chunks, strategy.block_size)
    return strategy.proposer.prefill(network, chunk, params, state, max_chunks)


def prefill_prompts(
    network: Network, chunk: int, params: Any, state: State, max_chunks: jax.Array, block_size: int = 1
) -> State:
    """`prefill` of one network, whose own `params` these are. A token sees its own block of B and those before it."""
    chunk = max(block_size, chunk // block_size * block_size)
    slot = jnp.arange(chunk, dtype=jnp.int32)
    sees = slot[:, None] // block_size >= slot // block_size
    whole = state.prompt // block_size * block_size - block_size
    # Where T is no multiple of the chunk the last one begins earlier, on tokens that are committed already.
    last = (state.tokens.shape[1] - chunk) // block_size * block_size

    def missing(state):
        return jnp.clip(whole - jnp.minimum(state.cursor, last), 0, chunk) * (whole > state.cursor)

    def more(carry):
        chunks, state = carry
        return (chunks < max_chunks) & (missing(state) > 0).any()

    def body(carry):
        chunks, state = carry
        rows = state.cursor.shape[0]
        begin = jnp.minimum(state.cursor, last)
        positions = begin[:, None] + slot
        tokens = jnp.take_along_axis(state.tokens, positions, 1, mode="clip")
        attend = attend_cache_and_slots(begin, jnp.broadcast_to(sees, (rows, chunk, chunk)))
        _, slots = network.forward(params, tokens, positions, attend, state.cache)
        count = missing(state)
        first = jnp.zeros(rows, jnp.int32)
        cache = network.commit(state.cache, slots, first, chunk, begin, count > 0)
        cursor = jnp.where(count > 0, begin + count, state.cursor)
        return chunks + 1, dataclasses.replace(state, cache=cache, cursor=cursor)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, donate_argnames=("state",))
def clear_lane(state: State, lane: jax.Array) -> State:
    """Zeros in whatever a lane (data) has that could hold NaN."""

    def clear(x):
        return x.at[lane].set(0) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return dataclasses.replace(
        state, cache=jax.tree.map(clear, state.cache), proposer=jax.tree.map(clear, state.proposer)
    )


@functools.partial(jax.jit, static_argnames=("strategy", "capacity"))
def resize(strategy: Strategy, state: State, capacity: int) -> State:
    """The same lanes with room for `capacity` tokens each; what a lane that goes on holds must fit."""

    def resized(x, axis):
        kept = jax.lax.slice_in_dim(x, 0, min(capacity, x.shape[axis]), axis=axis)
        return jnp.pad(kept, [(0, capacity - kept.shape[axis] if i == axis else 0) for i in range(x.ndim)])

    return dataclasses.replace(
        state,
        tokens=resized(state.tokens, 1),
        emitted_by=resized(state.emitted_by, 1),
        cache=jax.tree.map(lambda x: resized(x, 2), state.cache),
        proposer=strategy.proposer.resize(state.proposer, resized),
    )


@functools.partial(jax.jit, static_argnames=("network", "strategy"), donate_argnames=("state",))
def advance(
    network: Network,
    strategy: Strategy,
    params: Params,
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
        return steps + 1, strategy.step(network, params, controls, state)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


def step_and_logits(
    network: Network, strategy: Strategy, params: Params, controls: Controls, state: State
) -> tuple[State, jax.Array]:
    """One forward for every row that has not ended, and the logits [N, J, V] of the J slots the plan judges.

    Needs T ≥ length + max(plan.window, plan.commits) in every row that has not ended, which holds when T ≥ limit +
    `strategy.slack`.
    """
    plan, proposer = strategy.plan, strategy.proposer
    active = ~(state.done | controls.halted)
    pending = state.length - state.cursor

    def logits_of(hidden):
        return jnp.where(controls.allowed, network.unembed(params.target, hidden), -jnp.inf)

    guesses, mine = proposer.propose(params, controls, state)
    sees = plan.sees if guesses.parents is None else plan.sees_with(guesses.parents)
    hidden, slots, fed = _forward(
        network, plan, params.target, controls, state, guesses, sees, proposer.masks(mine), pending, active
    )
    judged = jnp.asarray(plan.judged)
    logits = logits_of(hidden[:, judged])
    depth = sees[:, judged][..., judged[1:]].sum(-1) if plan.dynamic else plan.depth[list(plan.judged)]
    positions = state.length[:, None] + depth
    own = sampling.choose(logits, positions, **sampling_of(controls))

    zero = jnp.zeros_like(state.length)
    path, at, accepted = zero[:, None][:, :0], zero, zero
    if plan.drafts:
        path, at, accepted, own = _verify(plan, controls, guesses, logits, own, positions)
    tail, taken = _tail(plan, controls, state, hidden, logits, own, at, accepted, logits_of)
    place = jnp.arange(plan.window)
    kept = jnp.take_along_axis(jnp.pad(guesses.tokens, ((0, 0), (1, 0))), path, 1)
    behind = jnp.take_along_axis(tail, jnp.clip(place - accepted[:, None], 0, plan.tail - 1), 1)
    emitted = jnp.where(place < accepted[:, None], jnp.pad(kept, ((0, 0), (0, plan.tail))), behind)
    after, count = emit(network, controls, state, active, emitted, accepted + taken)

    # Accepted drafts were fed, so their keys and values are there; other emitted tokens are pending in the next step.
    committed = pending + jnp.minimum(accepted, count - 1)
    # Every active row accepts a token, so `count > 0` is `active`; but it comes out of the logits, so that writing the
    # cache depends on every layer having read it. Without that the compiler may write first, and then copies the cache.
    writes, first = count > 0, plan.pending - pending
    if not plan.is_chain:  # what is kept does not lie side by side
        index = jnp.concatenate([zero[:, None] + jnp.arange(plan.pending), plan.root + path], 1)
        slots = jax.tree.map(lambda x: jnp.take_along_axis(x, index[:, None, :, None], axis=2), slots)
    elif (missing := plan.pending - 1 + plan.commits - plan.size) > 0:  # a slice that begins late must not reach past S
        slots = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))), slots)
    seen = Seen(state, guesses, own, at, accepted, emitted, count, after.length, hidden, logits_of)
    after = dataclasses.replace(
        after,
        cursor=state.cursor + jnp.where(active, committed, 0),
        cache=network.commit(state.cache, slots, first, plan.commits, state.cursor, writes),
        proposer=proposer.observe(network, params, controls, mine, seen),
        steps=state.steps + 1,
        fed=state.fed + fed,
    )
    return after, logits


def emit(
    network: Network, controls: Controls, state: State, active: jax.Array, emitted: jax.Array, count: jax.Array
) -> tuple[State, jax.Array]:
    """Take the first `count` [N] of `emitted` [N, W] up to an end token or the row's limit: (state, how many [N]).

    Counts a forward for each active row. Cursor, cache and proposer are left as they are.
    """
    window = emitted.shape[1]
    count = jnp.minimum(count, controls.limit - state.length)
    is_end = (emitted[..., None] == controls.ends[:, None]).any(-1) & (jnp.arange(window) < count[:, None])
    stops = is_end.any(-1)
    count = jnp.where(active, jnp.where(stops, is_end.argmax(-1) + 1, count), 0)
    forwards, length = state.forwards + active, state.length + count
    by = jnp.broadcast_to(forwards[:, None], emitted.shape)
    after = dataclasses.replace(
        state,
        tokens=network.write_rows(state.tokens, emitted, state.length, count > 0),
        emitted_by=network.write_rows(state.emitted_by, by, state.length, count > 0),
        length=length,
        forwards=forwards,
        done=state.done | (active & (stops | (length >= controls.limit))),
    )
    return after, count


def sampling_of(controls: Controls) -> dict[str, Any]:
    """The arguments of `marsjax.decoding.sampling.choose` that a batch was asked for."""
    return {name: getattr(controls, name) for name in ("temperature", "top_k", "top_p", "seed")}


def _verify(plan: SlotPlan, controls: Controls, guesses: Drafts, logits, own, positions):
    """(path [N, reach] of heads, last head [N], accepted drafts [N], the model's own tokens [N, H])."""
    parents = guesses.parents
    if parents is None:
        parents = jnp.broadcast_to(plan.head_parents, guesses.tokens.shape)
    present = jnp.arange(plan.drafts) < guesses.count[:, None]
    accept = guesses.tokens == jnp.take_along_axis(own, parents, 1)
    if plan.is_chain:  # with several drafts for one position, a draw from the model and a walk is exact too
        rejects = controls.rejection & (controls.temperature > 0)

        def with_rejection():
            how = sampling_of(controls)
            kept, instead = sampling.reject(logits[:, :-1], positions[:, :-1], guesses.tokens, guesses.logits, **how)
            at_drafts = rejects[:, None] & present
            chosen = jnp.where(at_drafts, instead, own[:, :-1])
            return jnp.where(at_drafts, kept, accept), jnp.concatenate([chosen, own[:, -1:]], axis=1)

        accept, own = jax.lax.cond(rejects.any(), with_rejection, lambda: (accept, own))
    sure = acceptance.is_sure(guesses.confidence, controls.tau, controls.measure)
    sure = acceptance.sure_path(sure, parents, plan.reach)
    return *acceptance.walk(parents, accept & present, sure & present, plan.reach), own


def _tail(plan: SlotPlan, controls: Controls, state: State, hidden, logits, own, at, accepted, logits_of):
    """(tokens [N, plan.tail] behind the accepted drafts, how many of them are taken [N]).

    The model's own one always; then, where the plan continues, those of the masks behind it as far as τ allows.
    """
    if not (plan.continues and plan.asks):
        return jnp.take_along_axis(own, at[:, None], 1), jnp.ones_like(accepted)
    if not plan.drafts:  # the masks' rows were among the judged
        confidence = acceptance.confidence(logits, own, controls.measure)
        return own, acceptance.accept(confidence, controls.tau, controls.measure)
    rows = jnp.asarray(plan.groups)[at]
    logits = logits_of(jnp.take_along_axis(hidden, rows.reshape(*rows.shape, *(1,) * (hidden.ndim - 2)), axis=1))
    positions = (state.length + accepted)[:, None] + 1 + jnp.arange(plan.asks)
    further = sampling.choose(logits, positions, **sampling_of(controls))
    confidence = jnp.pad(acceptance.confidence(logits, further, controls.measure), ((0, 0), (1, 0)))
    tail = jnp.concatenate([jnp.take_along_axis(own, at[:, None], 1), further], 1)
    return tail, acceptance.accept(confidence, controls.tau, controls.measure)


def _forward(
    network, plan: SlotPlan, params, controls: Controls, state: State, guesses, sees, vectors, pending, active
):
    """(hidden rows [N, S, ...], keys and values) of all slots, and how many were really fed.

    With `network.short_steps`, where no row has more than one pending token (always at τ = 1) the slots of longer runs
    are not fed: P - 1 fewer, which matters where arithmetic and not memory bounds a step.
    """

    def run(plan: SlotPlan, sees):
        # Absent slots are seen by nobody: the pending run is right-aligned, and there may be fewer drafts than slots.
        slot = jnp.arange(plan.size)
        first, last = (plan.pending - pending)[:, None], (plan.pending + guesses.count)[:, None]
        present = (slot >= first) & ((slot < last) | plan.is_mask)
        sees = sees & present[:, None, :]
        # A slot's position counts the slots it sees from the root on.
        depth = (sees & (slot > plan.root)).sum(-1) if plan.drafts else plan.depth
        positions = jnp.maximum(state.length[:, None] - 1 + jnp.where(slot <= plan.root, plan.depth, depth), 0)
        known = jnp.take_along_axis(state.tokens, positions[:, : plan.pending], 1, mode="clip")
        masks = jnp.full((known.shape[0], plan.masks), controls.mask_id, known.dtype)
        tokens = jnp.concatenate([known, guesses.tokens, masks], axis=1)
        asked = MaskSlots(plan.ranks, None if vectors is None else vectors[:, plan.ranks]) if plan.masks else None
        attend = attend_cache_and_slots(state.cursor, sees)
        hidden, slots = network.forward(params, tokens, positions, attend, state.cache, asked)
        return hidden, slots, jnp.int32(plan.size)

    def run_short():
        hidden, slots, fed = run(short := plan.with_pending(1), short.sees)
        cut = plan.pending - 1
        return _pad(hidden, cut, 1), jax.tree.map(lambda x: _pad(x, cut, 2), slots), fed

    if plan.pending == 1 or not network.short_steps:
        return run(plan, sees)
    return jax.lax.cond(((pending <= 1) | ~active).all(), run_short, lambda: run(plan, sees))


def _pad(x: jax.Array, before: int, axis: int) -> jax.Array:
    return jnp.pad(x, [(before if i == axis else 0, 0) for i in range(x.ndim)])
