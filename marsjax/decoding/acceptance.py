"""How many of a step's predictions are kept (arXiv 2604.07023, section 4)."""

import jax
import jax.numpy as jnp

MEASURES = ("probability", "margin", "entropy")
PROBABILITY, MARGIN, ENTROPY = range(3)


def confidence(logits: jax.Array, chosen: jax.Array, measure: jax.Array) -> jax.Array:
    """How sure the model is of each prediction, in float32.

    Always of the model's own distribution, whatever temperature, top-k or top-p the token was drawn with: τ says how
    predictable the model finds the position. Scaled by a low temperature every prediction would look sure, and τ would
    mean something else for each temperature.

    Args:
      logits: [N, W, V] float32, forbidden ids at -inf. chosen: [N, W] int32.
      measure: [N] int32, PROBABILITY, MARGIN or ENTROPY. Data, not a constant: rows of one batch may differ, and the
        two that need a further pass over the vocabulary run only when a row asks.

    Returns:
      [N, W]: p(chosen), p(top1) - p(top2), or the entropy in nats (lower is surer).
    """
    top = logits.max(-1, keepdims=True)
    log_total = jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)) + top

    def probability():
        return jnp.exp(jnp.take_along_axis(logits, chosen[..., None], -1) - log_total)[..., 0]

    def margin():
        ids = jnp.arange(logits.shape[-1])
        best = jnp.where(logits == top, ids, logits.shape[-1]).min(-1, keepdims=True)
        second = jnp.where(ids == best, -jnp.inf, logits).max(-1, keepdims=True)
        return (jnp.exp(top - log_total) - jnp.exp(second - log_total))[..., 0]

    def entropy():
        logp = logits - log_total
        return -jnp.where(jnp.isneginf(logp), 0.0, jnp.exp(logp) * logp).sum(-1)

    def others():
        return jnp.where(measure[:, None] == MARGIN, margin(), entropy())

    first = probability()
    return jax.lax.cond(
        (measure != PROBABILITY).any(),
        lambda: jnp.where(measure[:, None] == PROBABILITY, first, others()),
        lambda: first,
    )


def accept(confidence: jax.Array, tau: jax.Array, measure: jax.Array) -> jax.Array:
    """Accepted tokens a row, [N] int32 in 1..W: the first always, then for as long as the model is sure.

    The τ that means AR (probability and margin 1, entropy 0) accepts exactly one, also where the confidence rounds
    to τ.

    Args:
      confidence: [N, W] float32; column j belongs to the j-th prediction. tau: [N] float32. measure: [N] int32.
    """
    return 1 + jnp.cumprod(is_sure(confidence, tau, measure)[:, 1:].astype(jnp.int32), axis=1).sum(1)


def is_sure(confidence: jax.Array, tau: jax.Array, measure: jax.Array) -> jax.Array:
    """[N, W] bool: whether τ accepts a confidence; nothing at the τ that means AR."""
    tau, is_entropy = tau[:, None], measure[:, None] == ENTROPY
    return jnp.where(is_entropy, (confidence <= tau) & (tau > 0), (confidence >= tau) & (tau < 1))


def fills(confidence: jax.Array, is_open: jax.Array, tau: jax.Array, measure: jax.Array) -> jax.Array:
    """[N, B] bool: which of the open places are filled, in any order: those that τ accepts, and the surest always.

    Args:
      confidence, is_open: [N, B]; among equals the first is the surest. tau: [N] float32. measure: [N] int32.
    """
    order = jnp.where(measure[:, None] == ENTROPY, -confidence, confidence)
    surest = jnp.argmax(jnp.where(is_open, order, -jnp.inf), -1, keepdims=True)
    return is_open & (is_sure(confidence, tau, measure) | (jnp.arange(confidence.shape[1]) == surest))


def walk(parents: jax.Array, equal: jax.Array, sure: jax.Array, reach: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Go from the root through accepted drafts: (path [N, reach] of heads, last head [N], steps taken [N]).

    At each head to the draft behind it that is the model's own choice, else to one that is sure, else stop.

    Args:
      parents: [N, D] int32, the head each draft hangs on; head 0 is the root, head i draft i - 1.
      equal: [N, D] bool, whether a draft is the model's own choice. sure: [N, D] bool, whether τ accepts it.
    """
    at = jnp.zeros(equal.shape[0], jnp.int32)
    accepted, goes_on, path = at, at == 0, []
    for _ in range(reach):
        child = parents == at[:, None]
        right = child & equal
        next_ones = jnp.where(right.any(1, keepdims=True), right, child & sure)
        goes_on = goes_on & next_ones.any(1)
        at = jnp.where(goes_on, next_ones.argmax(1).astype(jnp.int32) + 1, at)
        accepted = accepted + goes_on
        path.append(at)
    return jnp.stack(path, 1), at, accepted


def sure_path(sure: jax.Array, parents: jax.Array, reach: int) -> jax.Array:
    """[N, D] bool: whether a draft and all before it are sure."""
    along = sure
    for _ in range(reach - 1):
        along = sure & ((parents == 0) | jnp.take_along_axis(along, jnp.maximum(parents - 1, 0), 1))
    return along
