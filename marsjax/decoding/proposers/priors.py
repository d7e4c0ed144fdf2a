"""What is known of a token by the one before it, mixed into what a mask says.

A probing mask knows the text but not the token in front of the one it guesses. Two cheap things do: what followed that
token in this text before, and what the model itself says behind it without any text.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.decoding import sampling
from marsjax.decoding.cache import attend_cache_and_slots

KEPT = 32  # likeliest tokens kept behind each token
FLOOR = -12.0  # log-probability of all others
EXPONENT = 0.5  # of the model's own bigrams; chosen on half of the prompts of benchmarks/probing.py
LATEST = 32  # times a token was met before, of which what followed it counts
ROWS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prior:
    """Data under jit; shapes and which of the two there are decide what is compiled."""

    followers: Any  # [] float32 in 0..1, weight of what followed in this text; None: left out
    ids: Any = None  # [V, M] int32, what the model expects behind each token; None: left out
    logp: Any = None  # [V, M] float32

    def mixed(self, logp: jax.Array, before: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Log-probabilities [N, V] of a mask, given the token before [N] as well.

        Args:
          tokens: [N, T] int32, the text. length: [N] int32, tokens known.
        """
        rows = jnp.arange(logp.shape[0])[:, None]
        if self.ids is not None:
            expected = jnp.full(logp.shape, FLOOR).at[rows, self.ids[before]].set(self.logp[before])
            logp = jax.nn.log_softmax(logp + EXPONENT * expected, axis=-1)
        if self.followers is not None:
            there = (tokens[:, :-1] == before[:, None]) & (jnp.arange(1, tokens.shape[1]) < length[:, None])
            # The latest are enough, and a scatter of few where accelerators write one after the other.
            place, at = jax.lax.top_k(jnp.where(there, jnp.arange(there.shape[1]), -1), min(LATEST, there.shape[1]))
            known = (place >= 0).astype(jnp.float32)
            seen = known.sum(-1, keepdims=True)
            shares = known / jnp.maximum(seen, 1)
            shares = jnp.zeros(logp.shape).at[rows, jnp.take_along_axis(tokens, at + 1, 1)].add(shares)
            weight = jnp.where(seen > 0, self.followers, 0.0)
            logp = jnp.log((1 - weight) * jnp.exp(logp) + weight * shares)
        return logp


def bigrams(file: Path, network: Any, params: Any, prefix: list[int], vocab: int) -> tuple[jax.Array, jax.Array]:
    """(ids, log-probabilities) [V, M] of what a model expects behind `prefix` and each single token.

    Read from `file`, or made (a forward pass of every token) and written there.
    """
    model = np.asarray(network.embed(params, jnp.arange(min(vocab, 64))))  # enough to know it again
    if file.is_dir():
        raise ValueError(f"bigrams is the name of a file, and {file} is a directory")
    if file.exists():
        ids, logp, whose = _read(file)
        if len(ids) != vocab or whose.shape != model.shape or not np.allclose(whose, model, atol=1e-2):
            raise ValueError(
                f"{file} is a table of another model ({len(ids)} tokens, here {vocab}; its embeddings differ); name "
                "another file"
            )
    else:
        unfinished = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            out = unfinished.open("wb")  # before the work
        except OSError as error:
            raise ValueError(
                f"cannot write a table of bigrams to {file} ({error.strerror}); name another file"
            ) from None
        try:
            with out:
                ids, logp = _made(network, params, prefix, vocab)
                np.savez(out, ids=ids, logp=logp, model=model)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    return jnp.asarray(ids), jnp.asarray(logp)


def _read(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as table:
            ids, logp, model = table["ids"], table["logp"], table["model"]
    except Exception as error:  # whatever a damaged file makes numpy raise
        raise ValueError(f"{file} is no table of bigrams ({error}); name another file, or delete it") from None
    good = ids.ndim == 2 and ids.shape == logp.shape == (len(ids), KEPT) and ids.dtype == np.int32
    if not good or not ((ids >= 0) & (ids < len(ids))).all() or not np.isfinite(logp).all():
        raise ValueError(f"{file} is no table of bigrams: its numbers are damaged; name another file, or delete it")
    return ids, logp, model


def _made(network, params, prefix, vocab) -> tuple[np.ndarray, np.ndarray]:
    from rich.progress import track

    length = max(1, len(prefix))
    place, start = np.arange(length), np.zeros(ROWS, np.int32)
    prompts = np.broadcast_to(np.asarray(prefix or [0], np.int32), (ROWS, length))
    sees = np.broadcast_to(place[:, None] >= place, (ROWS, length, length))

    # All that is constant comes as an argument, or the compiler works for a minute on attention of constants.
    @jax.jit
    def before(params, tokens, start, sees):
        cache = network.empty_cache(ROWS, length)
        positions = start[:, None] + jnp.arange(length)
        slots = network.forward(params, tokens, positions, attend_cache_and_slots(start, sees), cache)[1]
        return network.commit(cache, slots, start, length, start, start >= 0)

    @jax.jit
    def behind(params, cache, tokens, cursor, sees):
        hidden, _ = network.forward(params, tokens, cursor[:, None], attend_cache_and_slots(cursor, sees), cache)
        return sampling.top(jax.nn.log_softmax(network.unembed(params, hidden)[:, 0], axis=-1), KEPT)

    cache = before(params, prompts, start, sees)
    cursor, itself = start + np.int32(len(prefix)), np.ones((ROWS, 1, 1), bool)
    ids, logp = np.zeros((vocab, KEPT), np.int32), np.zeros((vocab, KEPT), np.float32)
    for first in track(range(0, vocab, ROWS), description="the model's bigrams", transient=True):
        here = slice(first, min(first + ROWS, vocab))
        tokens = np.minimum(np.arange(first, first + ROWS), vocab - 1).astype(np.int32)[:, None]
        best = behind(params, cache, tokens, cursor, itself)
        logp[here], ids[here] = (np.asarray(x)[: here.stop - first] for x in best)
    return ids, logp
