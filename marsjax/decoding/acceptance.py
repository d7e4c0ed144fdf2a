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


def verify(own: jax.Array, drafts: jax.Array, accept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a step emits that verified drafts: (tokens [N, k + 1], how many of them are accepted drafts [N]).

    The drafts up to the first that is not accepted, then the model's own token there.

    Args:
      own: [N, k + 1] int32, the model's own token behind the root and behind each draft.
      drafts: [N, k] int32. accept: [N, k] bool, whether each would be accepted if all before it were.
    """
    accepted = jnp.cumprod(accept.astype(jnp.int32), axis=1).sum(1)
    is_draft = jnp.arange(own.shape[1]) < accepted[:, None]
    return jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), own), accepted
