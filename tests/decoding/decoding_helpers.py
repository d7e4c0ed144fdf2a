"""What the tests of this folder share."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import marsjax.weights
from marsjax.decoding import Generator, plans, requests
from marsjax.decoding.cache import LayerCache, commit, write_rows
from marsjax.decoding.engine import Engine, Runtime
from marsjax.decoding.step import Params, Strategy

CASES = Path(__file__).parents[1] / "cases"
END, PAD, MASK = 1, 0, 65  # of the two tiny models
ROWS = 12  # of every batch in these tests, so that they share programs


@functools.cache
def pretrained(name):
    return marsjax.weights.load(CASES / name)


@functools.cache
def generator(name="tiny_mars", strategy="mars", window=4, forbid=True, **options):
    return Generator(
        pretrained(name),
        mask_id=None if name == "demo_mars" else MASK,
        strategy=strategy,
        window=window if strategy == "mars" else None,
        **options,
        prefill_chunk=16,
        forbidden=None if forbid else (),
    )


def read_cases(name):
    return json.loads((CASES / name).read_text())


@dataclasses.dataclass(frozen=True)
class Script:
    """A network whose logits at answer position p put `tokens[p]` on top with probability `sure[p]`, come what may.

    The table travels as its weights, so that all scripts of one vocabulary share their programs. Hidden states and keys
    are positions, so that a test can read off the cache which slots were committed.
    """

    vocab: int
    lane_groups = 1
    short_steps = True

    def empty_cache(self, rows, length):
        empty = jnp.full((rows, 1, length, 1), -1.0)
        return [LayerCache(empty, empty)]

    def forward(self, params, tokens, positions, attend, cache, masks=None):
        k = positions[:, None, :, None].astype(jnp.float32)
        return positions, [LayerCache(k, tokens[:, None, :, None].astype(jnp.float32))]

    commit = staticmethod(commit)
    write_rows = staticmethod(write_rows)

    def state_sharding(self, params, state):
        return jax.local_devices()[0]

    def unembed(self, params, hidden):
        tokens, sure, prompt_length = params
        at = jnp.clip(hidden + 1 - prompt_length, 0, len(tokens) - 1)
        top, p = tokens[at][..., None], sure[at][..., None]
        return jnp.log(jnp.where(jnp.arange(self.vocab) == top, p, (1 - p) / (self.vocab - 1)))


def script(tokens, sure, prompt_length=3, vocab=16):
    """(network, params, prompt_length); the last entry of the table repeats for ever."""
    tokens, sure = (
        np.pad(np.asarray(x, d), (0, 64 - len(x)), "edge") for x, d in ((tokens, "int32"), (sure, "float32"))
    )
    return Script(vocab), (tokens, sure, np.int32(prompt_length)), prompt_length


class Running:
    """Requests in an engine with a lane for each."""

    def __init__(self, engine, specs):
        self.engine, self.requests = engine, [engine.submit(spec) for spec in specs]

    @property
    def over(self):
        return self.engine.idle

    def advance(self, steps=None):
        self.engine.turn(steps)
        return [request.take().text for request in self.requests]

    def results(self):
        return [request.result for request in self.requests]


def script_batch(scripted, window, rows=1, lanes=None, tokenizer=None, ends=(), **options):
    """A batch of `rows` equal prompts answered by a script."""
    network, params, prompt_length = scripted
    runtime = Runtime(
        network=network,
        params=Params(params, ()),
        strategy=Strategy(plans.mars(window)),
        prefill_chunk=8,
        tokenizer=tokenizer,
        eos_ids=ends,
        mask_id=np.int32(0),
        allowed=jnp.ones(network.vocab, bool),
        vocab_size=network.vocab,
        max_positions=1000,
    )
    specs = requests.check(
        [[2] * prompt_length] * rows, strategy=runtime.strategy, max_positions=1000, vocab_size=network.vocab,
        has_tokenizer=tokenizer is not None, eos_ids=ends, **({"max_new_tokens": 8, "seed": 0} | options),
    )  # fmt: skip
    return Running(Engine(runtime, lanes or rows), specs)


def finish(batch, steps=None):
    while not batch.over:
        batch.advance(steps)
    return batch.results()
