"""Models with random adapters, none of whose numbers is zero, and what they say, written out."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import strategies_reference as reference
from decoding_helpers import MASK, PAD, pretrained
from decoding_reference import LENGTH
from flax import nnx
from strategies_helpers import blurred, marked

from marsjax.models import adapters
from marsjax.models.config import AdapterConfig
from marsjax.models.layout import from_params

MASKS = 5


def with_adapter(loaded, *, masks=MASKS, sampler=True, gated=True, mesh=None):
    """A `Pretrained` with an adapter beside its weights; without a mask token where the adapter has masks.

    Masks are the mask token's row, each a little off, so that a trained model's still guess something.
    """
    config = AdapterConfig(rank=3, alpha=1.0, gated=gated, masks=masks, sampler=sampler)
    decoder, draw = adapters.attach(loaded.model, config, mesh=mesh), np.random.default_rng(0)
    own, added = adapters.split(nnx.to_pure_dict(nnx.state(decoder)))

    def off(x, scale=0.1):
        return jax.device_put(x + scale * draw.standard_normal(x.shape, dtype=np.float32), x.sharding)

    embeddings = {}
    if masks:
        places = added.pop("masks")["embedding"].sharding
        row = np.asarray(own["embed_table"]["embedding"])[MASK]
        embedding = row + 0.01 * draw.standard_normal((masks, len(row)), dtype=np.float32)
        embeddings = {"masks": {"embedding": jax.device_put(embedding, places)}}
    added = jax.tree.map(off, added) | embeddings
    decoder = from_params(decoder.config, adapters.join(own, added), decoder.layout)
    return dataclasses.replace(loaded, model=decoder, mask_id=None if masks else loaded.mask_id)


@functools.cache
def adapted(model, blur=False, **config):
    return with_adapter((blurred if blur else marked)(model), **config)


class Adapted(reference.Model):
    """The base model; masks see its keys, and are what the model says whose adapter acts everywhere.

    candidates: of each mask, that the sampler head chooses among; None: the masks speak for themselves.
    """

    def __init__(self, model, *, blur=False, candidates=None, **config):
        super().__init__((blurred if blur else pretrained)(model).model, (MASK, PAD))
        self._said = _masks_of(self.decoder, adapted(model, blur, **config).model)
        self.params = nnx.to_pure_dict(nnx.state(adapted(model, blur, **config).model))
        self.candidates = candidates

    def asked(self, ids, k, vectors=None):
        return self._rows(ids, k)[1]

    def _rows(self, ids, k):
        hidden, logits = self._said(ids, k)
        logits = logits.astype(np.float64)
        logits[:, self.forbidden] = -np.inf
        return hidden.astype(np.float64), logits

    def behind(self, text, k):
        hidden, logits = self._rows(text, k)
        return reference.Alone(logits) if self.candidates is None else _Sampling(self, hidden, logits)


@dataclasses.dataclass
class _Sampling:
    """Masks of hidden rows [k, D] and logits [k, V] that know the token before the one they predict."""

    model: Adapted
    hidden: np.ndarray
    alone: np.ndarray

    @property
    def k(self):
        return len(self.hidden)

    def row(self, i, before):
        head = jax.tree.map(lambda x: np.asarray(x, np.float64), self.model.params["sampler"])
        x = np.concatenate([self.model.table[before].astype(np.float64), self.hidden[i]])
        for linear, norm in (("first", "first_norm"), ("second", "second_norm")):
            x = x @ head[linear]["kernel"] + head[linear]["bias"]
            x = x / (1 + np.exp(-x))
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * head[norm]["scale"] + head[norm]["bias"]
        said = self.model.table.astype(np.float64) @ x
        said[self.model.forbidden] = -np.inf
        if (count := self.model.candidates) == 0:
            return said
        p = reference.softmax(self.alone[i])
        among = sorted(range(len(p)), key=lambda t: (-p[t], t))[:count]
        p[among] = p[among].sum() * reference.softmax(said[among])
        with np.errstate(divide="ignore"):
            return np.log(p)


def _masks_of(base, adapted_model):
    """(text, k) → hidden rows and logits of k masks behind a text: two models, one after the other."""
    everywhere = dataclasses.replace(adapted_model.config.adapter, gated=False)
    config = dataclasses.replace(adapted_model.config, adapter=everywhere)
    other = from_params(config, nnx.to_pure_dict(nnx.state(adapted_model)), adapted_model.layout)
    split, other_split = nnx.split(base), nnx.split(other)

    def mixed(q, k, v, sees):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])
        return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(jnp.where(sees, scores, -1e30)), v)

    @functools.partial(jax.jit, static_argnums=3)
    def run(params, tokens, length, count):
        model, theirs = nnx.merge(split[0], params[0]), nnx.merge(other_split[0], params[1])
        place = jnp.arange(LENGTH)
        sees = place[:, None] >= place
        nothing = jnp.zeros((model.config.num_layers, 1))
        _, keys = model(
            tokens, positions=place[None], layer_states=nothing,
            attend=lambda q, k, v, _: (mixed(q, k, v, sees), (k, v)),
        )  # fmt: skip

        def attend(q, k, v, state):
            of_masks = jnp.tril(jnp.ones((count, count), bool))
            sees = jnp.concatenate([jnp.broadcast_to(place < length, (count, LENGTH)), of_masks], 1)
            k, v = (jnp.concatenate([old, new], 1) for old, new in zip(state, (k, v), strict=True))
            return mixed(q, k, v, sees), state

        embeddings = theirs.masks.embedding[...]
        embeddings = jnp.broadcast_to(embeddings, (count, embeddings.shape[1])) if len(embeddings) == 1 else embeddings
        hidden, _ = theirs(
            embeddings=embeddings[None, :count], positions=length + jnp.arange(count)[None], layer_states=keys,
            attend=attend,
        )  # fmt: skip
        return hidden[0], theirs.unembed(hidden)[0]

    def said(ids, k):
        if not k:
            return np.zeros((0, config.hidden_size)), np.zeros((0, config.vocab_size))
        tokens = np.array([list(ids) + [0] * (LENGTH - len(ids))], np.int32)
        return map(np.asarray, run((split[1], other_split[1]), tokens, len(ids), k))

    return said
