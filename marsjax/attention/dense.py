"""Attention written out: the reference every other path is held against, and the path for short sequences."""

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention; softmax in float32; a row that may see nothing gives 0, also in its gradient.

    Args:
      q: [N, Q, H, h]. k, v: [N, T, K, h] with H a multiple of K; keys are shared, never repeated.
      mask: [N, Q, T] bool, True where the query may see the key.

    Returns:
      [N, Q, H, h] in q's dtype.
    """
    n, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(n, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("nqkgh,ntkh->nkgqt", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    mask = mask[:, None, None]
    # A finite floor, not -inf: rows that see nothing must not make NaN, forward or backward.
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    weights = jnp.where(mask, weights, 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    mixed = jnp.einsum("nkgqt,ntkh->nqkgh", weights.astype(v.dtype), v)
    return mixed.reshape(n, queries, heads, head_dim).astype(q.dtype)
