"""The attention that the objectives plug into the decoder. Masks are computed inside the program, from the batch."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from marsjax.attention import dense
from marsjax.attention.masks import Rows, causal, dense_mask, two_stream
from marsjax.models.decoder import Attend

Attention = Literal["blocks", "dense"]


def causal_attend(rows: Rows) -> Attend:
    """Causal attention within documents; fields of `rows` are [N, S]."""
    mask = dense_mask(causal, rows)
    return lambda q, k, v, state: (dense.attend(q, k, v, mask), state)


def two_stream_attend(clean: Rows, noisy: Rows, block_size: int, attention: Attention = "blocks") -> Attend:
    """MARS attention over `[clean | noisy]` (arXiv 2604.07023, section 3); clean [N, L], noisy [N, M].

    "dense" takes any rows and computes the (L+M)² square, of which at most a quarter counts. "blocks" computes the
    clean square, and for the noisy rows the clean prefix and their own block: half the work and memory. It needs
    every run of `block_size` noisy rows to lie in one block (`marsjax.training.objectives.check_aligned`).
    """
    if attention == "dense":
        mask = dense_mask(two_stream, Rows(*(jnp.concatenate(f, axis=1) for f in zip(clean, noisy, strict=True))))
        return lambda q, k, v, state: (dense.attend(q, k, v, mask), state)
    if attention != "blocks":
        raise ValueError(f"attention {attention!r} is not one of blocks, dense")
    length, noisy_length = clean.position.shape[1], noisy.position.shape[1]
    padded = -(-noisy_length // block_size) * block_size

    def in_blocks(x):
        x = jnp.pad(x, ((0, 0), (0, padded - noisy_length), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], padded // block_size, block_size, *x.shape[2:])

    clean_mask = dense_mask(causal, clean)
    prefix_mask = _mask(noisy, clean)
    own = Rows(*(in_blocks(field) for field in noisy))
    own_mask = _mask(own, own)

    def attend(q, k, v, state):
        of_clean = dense.attend(q[:, :length], k[:, :length], v[:, :length], clean_mask)
        prefix = _partial("nqkgh,ntkh->nkgqt", "nkgqt,ntkh->nqkgh", q[:, length:], k[:, :length], v[:, :length],
                          prefix_mask[:, None, None])  # fmt: skip
        q, k, v = (in_blocks(x[:, length:]) for x in (q, k, v))
        own = _partial("nbqkgh,nbtkh->nbkgqt", "nbkgqt,nbtkh->nbqkgh", q, k, v, own_mask[:, :, None, None])
        own = _Partial(*(x.reshape(x.shape[0], padded, *x.shape[3:])[:, :noisy_length] for x in own))
        of_noisy = _combine(prefix, own).reshape(*of_clean.shape[:1], noisy_length, *of_clean.shape[2:])
        return jnp.concatenate([of_clean, of_noisy.astype(of_clean.dtype)], axis=1), state

    return attend


def _mask(query: Rows, key: Rows) -> jax.Array:
    return two_stream(Rows(*(f[..., :, None] for f in query)), Rows(*(f[..., None, :] for f in key)))


class _Partial(NamedTuple):
    """Attention to some of the keys: unnormalised mixture [..., q, K, G, h], and weight and top score [..., q, K, G]."""

    mixed: Any
    weight: Any
    top: Any


def _partial(score_spec: str, mix_spec: str, q, k, v, mask) -> _Partial:
    heads, kv_heads, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(score_spec, grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    mixed = jnp.einsum(mix_spec, weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Partial(mixed, jnp.moveaxis(weights.sum(-1), -1, -3), jnp.moveaxis(top, -1, -3))


def _combine(a: _Partial, b: _Partial) -> jax.Array:
    """Softmax over the union of two disjoint sets of keys; no key in either gives 0."""
    top = jnp.maximum(a.top, b.top)
    scale_a, scale_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    weight = jnp.maximum(a.weight * scale_a + b.weight * scale_b, jnp.finfo(jnp.float32).tiny)
    return (a.mixed * scale_a[..., None] + b.mixed * scale_b[..., None]) / weight[..., None]
