"""How the candidates of k masks become a tree of N drafts (arXiv 2603.17942)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.decoding import acceptance, sampling
from marsjax.decoding.drafts import Drafts
from marsjax.decoding.proposers import lookup
from marsjax.decoding.proposers.priors import Prior

# (i, the token before [N]) → mask i's logits [N, V], and what ranks its candidates [N, V].
Ask = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Static:
    """`widths[i]` candidates of mask i + 1, all of them behind the best candidate of the mask before."""

    widths: tuple[int, ...]

    def of(self, seen, controls, ask: Ask, last, prior: Prior | None) -> Drafts:
        tokens, _, logits = _candidates(ask, last, self.widths, _given(prior, seen))
        first = _first_of_each(self.widths)
        flat = jnp.concatenate(tokens, 1)
        confidence = _unsure(flat).at[:, first].set(_confidence(controls, logits, tokens, last))
        return Drafts.of(flat, confidence=confidence)


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """The N best of all candidates by the product of probabilities along their path; the tree's form follows.

    Attributes:
      nodes: N. depth: k. lookup: of the nodes, up to this many go to what prompt lookup finds, in a row.
    """

    nodes: int
    depth: int
    lookup: int = 0

    def of(self, seen, controls, ask: Ask, last, prior: Prior | None) -> Drafts:
        rows, widths = last.shape[0], tuple(self.nodes - i for i in range(self.depth))
        tokens, logp, logits = _candidates(ask, last, widths, _given(prior, seen))
        sure = _confidence(controls, logits, tokens, last)
        path = jnp.zeros((rows, 1))
        scores, confidence, parents = [], [], []
        first = self.lookup  # flat index of this depth's first candidate
        before = jnp.full((rows, 1), -1)  # flat index of what they hang on; -1 is the root
        flat_tokens = list(tokens)
        if self.lookup:
            found, count = lookup.find(_with(seen), seen.length, self.lookup)
            there = jnp.arange(self.lookup) < count[:, None]
            # Above every candidate: a text that repeats itself is surer than any mask.
            scores.append(jnp.where(there, 1.0 + self.lookup - jnp.arange(self.lookup), -jnp.inf))
            confidence.append(_unsure(found))
            same = jnp.ones((rows, 1), bool)  # whether the best candidates so far are what lookup found
            parents.append(jnp.broadcast_to(jnp.arange(-1, self.lookup - 1), (rows, self.lookup)))
            flat_tokens.insert(0, found)
        for i, (ids, p) in enumerate(zip(tokens, logp, strict=True)):
            score = path + p
            twice = jnp.zeros(ids.shape, bool)
            if i < self.lookup:
                twice = same & (ids == found[:, i : i + 1]) & there[:, i : i + 1]
                same = twice[:, :1]
            scores.append(jnp.where(twice, -jnp.inf, score))
            confidence.append(_unsure(ids).at[:, 0].set(sure[:, i]))
            parents.append(jnp.broadcast_to(before, ids.shape))
            before = jnp.where(twice[:, :1], i, first)
            path, first = score[:, :1], first + ids.shape[1]
        score, parent = jnp.concatenate(scores, 1), jnp.concatenate(parents, 1)
        _, chosen = jax.lax.top_k(score, self.nodes)  # ties in their order: parents before their children
        where = jnp.full(score.shape, 0).at[jnp.arange(rows)[:, None], chosen].set(jnp.arange(1, self.nodes + 1))
        behind = jnp.take_along_axis(parent, chosen, 1)
        heads = jnp.where(behind < 0, 0, jnp.take_along_axis(where, jnp.maximum(behind, 0), 1))

        def picked(parts):
            return jnp.take_along_axis(jnp.concatenate(parts, 1), chosen, 1)

        return Drafts.of(picked(flat_tokens), confidence=picked(confidence), parents=heads.astype(jnp.int32))


def _with(seen) -> jax.Array:
    """[N, T] tokens after the step."""
    place = jnp.arange(seen.state.tokens.shape[1])
    at = place - seen.state.length[:, None]
    new = jnp.take_along_axis(seen.emitted, jnp.clip(at, 0, seen.emitted.shape[1] - 1), 1)
    return jnp.where(at >= 0, new, seen.state.tokens)


def _unsure(tokens: jax.Array) -> jax.Array:
    """No confidence, in the type that the state has from the start: another would compile the step twice."""
    return jnp.full(tokens.shape, jnp.nan, jnp.float32)


def _confidence(controls, logits: jax.Array, tokens: list[jax.Array], last: jax.Array) -> jax.Array:
    """[N, k], of the best candidate of each mask.

    Margin and entropy say how sure the mask is of its likeliest token. Where that was passed over, being the parent's,
    they say nothing about the next best.
    """
    best = jnp.concatenate([t[:, :1] for t in tokens], 1)
    sure = acceptance.confidence(logits, best, controls.measure)
    passed_over = sampling.greedy(logits) == jnp.concatenate([last[:, None], best[:, :-1]], 1)
    return jnp.where(passed_over & (controls.measure != acceptance.PROBABILITY)[:, None], jnp.nan, sure)


def _given(prior: Prior | None, seen) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """How much likelier [N, V] candidates with logits [N, V] are, in log, once the token before them [N] is known."""
    if prior is None:
        return None
    text = _with(seen)

    def gain(logits, before):
        alone = jax.nn.log_softmax(logits, axis=-1)  # -inf where it may not be emitted
        return jnp.where(jnp.isneginf(alone), 0.0, prior.mixed(alone, before, text, seen.length) - alone)

    return gain


def _candidates(
    ask: Ask, last: jax.Array, widths: tuple[int, ...], gain: Callable[[jax.Array, jax.Array], jax.Array] | None
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """The best tokens [N, width] of each mask, their log-probabilities, and all masks' logits [N, k, V].

    A parent's own token is passed over.

    Args:
      last: [N] int32, the token the tree hangs on. gain: see `_given`.
    """
    tokens, scores, told = [], [], []
    for i, width in enumerate(widths):
        logits, noisy = ask(i, last)
        known = noisy if gain is None else noisy + gain(logits, last)
        ids = jnp.arange(known.shape[-1])
        logp = jnp.where(ids == last[:, None], -jnp.inf, jax.nn.log_softmax(known, axis=-1))
        score, token = sampling.top(logp, width)
        tokens.append(token.astype(jnp.int32))
        scores.append(score)
        told.append(logits)
        last = tokens[-1][:, 0]
    return tokens, scores, jnp.stack(told, 1)


def _first_of_each(widths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *widths[:-1]))
