"""MARS decoding without a cache, in plain Python: the whole prefix and W - 1 masks in every forward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

LENGTH = 80


def attend(q, k, v, state):
    """Causal attention of one row of LENGTH tokens, written out."""
    q, k, v = (x[0].astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    earlier = np.array([[key <= query for key in range(LENGTH)] for query in range(LENGTH)])
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(earlier, scores, -1e30)), v)[None], state


@functools.cache
def _compiled(model):
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params, tokens):
        model = nnx.merge(graphdef, params)
        return model.unembed(model(tokens, positions=jnp.arange(LENGTH)[None], attend=attend)[0])[0]

    return lambda tokens: np.asarray(run(params, tokens))


def logits_of(model, ids):
    """[len(ids), V]."""
    return _compiled(model)(np.array([list(ids) + [0] * (LENGTH - len(ids))], np.int32))[: len(ids)]


def decode(model, prompt, *, window, tau, limit, end, mask, forbidden=(), measure="probability"):
    """(ids, accepted run lengths)."""
    ids, runs = [], []
    while True:
        logits = logits_of(model, [*prompt, *ids] + [mask] * (window - 1))[len(prompt) + len(ids) - 1 :]
        logits = logits.astype(np.float64)
        logits[:, list(forbidden)] = -np.inf
        run = 0
        for row in logits:
            p = np.exp(row - row.max())
            p /= p.sum()
            second, first = np.sort(p)[-2:]
            if run > 0:
                if measure == "probability":
                    sure = tau < 1 and first >= tau
                elif measure == "margin":
                    sure = tau < 1 and first - second >= tau
                else:
                    sure = tau > 0 and -(p[p > 0] * np.log(p[p > 0])).sum() <= tau
                if not sure:
                    break
            ids.append(int(p.argmax()))
            run += 1
            if ids[-1] == end or len(ids) == limit:
                return ids, [*runs, run]
        runs.append(run)


def decode_verified(model, prompt, *, plan, k, limit, end, mask, forbidden=(), tau=1.0):
    """(ids, accepted run lengths) of self-verification: the masks' drafts, kept while they are the model's own choice.

    "comb" asks k masks behind whatever was accepted; "chain" asks them behind all of its drafts only. With τ < 1 a
    draft is also kept if its probability and those of the drafts before it were at least τ.
    """

    def probabilities(tokens):
        logits = logits_of(model, tokens).astype(np.float64)
        logits[:, list(forbidden)] = -np.inf
        p = np.exp(logits - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)

    ids, runs, drafts = [], [], []
    while True:
        known = [*prompt, *ids]
        own = probabilities([*known, *(token for token, _ in drafts)]).argmax(1)[len(known) - 1 :]
        accepted = 0
        while accepted < len(drafts) and (drafts[accepted][0] == own[accepted] or drafts[accepted][1]):
            accepted += 1
        kept = [token for token, _ in drafts[:accepted]]
        emitted = [*kept, int(own[accepted])]
        emitted = emitted[: limit - len(ids)]
        if end in emitted:
            emitted = emitted[: emitted.index(end) + 1]
        ids += emitted
        runs.append(len(emitted))
        if ids[-1] == end or len(ids) == limit:
            return ids, runs
        if plan == "chain" and accepted < len(drafts):
            drafts = []
            continue
        rows = probabilities([*known, *kept] + [mask] * k)[-k:]
        sure = np.logical_and.accumulate([tau < 1 and row.max() >= tau for row in rows])
        drafts = [(int(row.argmax()), bool(s)) for row, s in zip(rows, sure, strict=True)]
