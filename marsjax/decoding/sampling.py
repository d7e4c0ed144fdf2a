"""Which token a row of logits becomes.

A sample is a function of the logits, the request's seed and the token's absolute position. Neither the row it sits in
nor the number of the step enters, so a request draws the same text in any batch and under any strategy.
"""

import math

import jax
import jax.numpy as jnp

MIN_TEMPERATURE = 1e-6


def greedy(logits: jax.Array) -> jax.Array:
    """Arg-max over the last axis as int32; exact ties go to the lowest id. A row with NaN gives V.

    The best block of ids first, then the best in it: XLA's own arg-max carries (value, index) pairs through one long
    reduction, which a CPU does not vectorise.
    """
    vocab = logits.shape[-1]
    size = math.gcd(vocab, 64)
    blocks = logits.reshape(*logits.shape[:-1], vocab // size, size)
    best = blocks.max(-1)
    top = best.max(-1, keepdims=True)
    block = jnp.minimum(_first(best == top), vocab // size - 1)
    within = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    # A sum keeps NaN; XLA's maximum on a CPU may drop it.
    return jnp.where(jnp.isnan(logits.sum(-1)), vocab, block * size + _first(within == top))


def top(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest `count` along the last axis, falling, and their ids [..., count] int32; ties: the lower id first.

    `jax.lax.top_k`, which on a CPU takes 20 ms for each row of a vocabulary, of the best blocks of ids alone.
    """
    vocab = values.shape[-1]
    size = math.gcd(vocab, 64)
    if count * size >= vocab:
        return jax.lax.top_k(values, min(count, vocab))
    blocks = values.reshape(*values.shape[:-1], vocab // size, size)
    # Each of `count` blocks has an element that is larger, or a tie with a lower id, than all of the others'.
    block = jnp.sort(jax.lax.top_k(blocks.max(-1), count)[1], axis=-1)
    best = jnp.take_along_axis(blocks, block[..., None], axis=-2)
    found, at = jax.lax.top_k(best.reshape(*best.shape[:-2], count * size), count)
    return found, jnp.take_along_axis(block, at // size, axis=-1) * size + at % size


def _first(hits: jax.Array) -> jax.Array:
    """Index of the first True along the last axis, int32; the axis' size where there is none."""
    size = hits.shape[-1]
    return jnp.where(hits, jnp.arange(size, dtype=jnp.int32), size).min(-1)


def choose(
    logits: jax.Array,
    positions: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
) -> jax.Array:
    """Chosen ids [N, W] int32.

    Args:
      logits: [N, W, V] float32, forbidden ids at -inf.
      positions: [N, W] int32, absolute position of the token each row of logits predicts.
      temperature: [N] float32; 0 is greedy. top_k: [N] int32; 0 keeps all. top_p: [N] float32; 1 keeps all, 0 keeps
        the likeliest token. seed: [N] uint32.

    A batch without sampling rows pays for no noise, one without top-k and top-p for no sorting.
    """
    best = greedy(logits)

    def sampled():
        drawn = greedy(_noisy(logits, positions, temperature, top_k, top_p, seed))
        return jnp.where(temperature[:, None] > 0, drawn, best)

    return jax.lax.cond((temperature > 0).any(), sampled, lambda: best)


def perturbed(
    logits: jax.Array,
    positions: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
) -> jax.Array:
    """What `choose` takes the arg-max of, [N, W, V]; its order ranks candidates. Arguments as in `choose`."""

    def sampled():
        noisy = _noisy(logits, positions, temperature, top_k, top_p, seed)
        return jnp.where(temperature[:, None, None] > 0, noisy, logits)

    return jax.lax.cond((temperature > 0).any(), sampled, lambda: logits)


def reject(
    logits: jax.Array,
    positions: jax.Array,
    drafts: jax.Array,
    proposed: jax.Array | None,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rejection sampling of drafts: (accept [N, k] bool, instead [N, k]).

    A draft d of q is kept with probability min(1, p(d) / q(d)); `instead` is a sample of what p has above q. The two
    are independent, and so what is emitted has the distribution p. Arguments as in `choose`, and:

    Args:
      drafts: [N, k] int32. proposed: [N, k, V] logits that they were drawn from, with the same temperature and cuts;
        None: each was certain to be proposed, q(d) = 1.
    """
    p = jax.nn.softmax(_kept(logits, temperature, top_k, top_p), axis=-1)
    if proposed is None:
        q = (jnp.arange(logits.shape[-1]) == drafts[..., None]).astype(p.dtype)
    else:
        q = jax.nn.softmax(_kept(proposed, temperature, top_k, top_p), axis=-1)

    def uniform(seed, position):
        return jax.random.uniform(_key(seed, position, _ACCEPT))

    p_draft, q_draft = (jnp.take_along_axis(x, drafts[..., None], -1)[..., 0] for x in (p, q))
    accept = jax.vmap(jax.vmap(uniform, (None, 0)))(seed, positions) * q_draft < p_draft
    above = jnp.maximum(p - q, 0.0)
    above = jnp.log(jnp.where(above.any(-1, keepdims=True), above, p))  # none, by rounding, where q is p
    return accept, greedy(above + _noise(seed, positions, logits.shape[-1], _INSTEAD))


_CHOICE, _ACCEPT, _INSTEAD = range(3)  # what a position's noise is used for


def _key(seed: jax.Array, position: jax.Array, use: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return key if use == _CHOICE else jax.random.fold_in(key, use)


def _noisy(logits, positions, temperature, top_k, top_p, seed) -> jax.Array:
    """Logits [N, W, V] at their temperature, cut, with the noise of a choice: their arg-max is a sample."""
    return _kept(logits, temperature, top_k, top_p) + _noise(seed, positions, logits.shape[-1], _CHOICE)


def _noise(seed: jax.Array, positions: jax.Array, vocab: int, use: int) -> jax.Array:
    """Gumbel noise [N, W, V]: the arg-max of logits plus it is a sample of their softmax."""

    def one(seed, position):
        return jax.random.gumbel(_key(seed, position, use), (vocab,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(seed, positions)


def _kept(logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits at their temperature, what top-k and top-p cut off at -inf."""
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, MIN_TEMPERATURE)[:, None, None]
    filters = (temperature > 0) & ((top_k > 0) | (top_p < 1))
    return jax.lax.cond(filters.any(), lambda: _filter(scaled, top_k, top_p), lambda: scaled)


def _filter(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits [N, W, V] with everything outside top-k, and then outside top-p of what is left, at -inf.

    Top-p keeps the fewest tokens whose probabilities reach p. Ties at either edge go to the lower id, so that exactly
    k tokens stay.
    """
    vocab = logits.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logits.shape)
    falling, order = jax.lax.sort((-logits, ids), dimension=-1, is_stable=True, num_keys=1)
    rank = jnp.arange(vocab)
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)[:, None, None]
    ranked = jax.nn.softmax(jnp.where(rank < limit, -falling, -jnp.inf), axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    p = top_p[:, None, None]
    # p = 1 keeps all: a cumulative sum that rounds up to 1 early must not cut the tail.
    keep = jnp.where(p < 1, (before < p) | (rank == 0), True) & (rank < limit)
    last = keep.sum(-1, keepdims=True) - 1
    edge, edge_id = -jnp.take_along_axis(falling, last, -1), jnp.take_along_axis(order, last, -1)
    return jnp.where((logits > edge) | ((logits == edge) & (ids <= edge_id)), logits, -jnp.inf)
