"""The strategies that propose by more than a row of masks, and the generators these tests share."""

import contextlib
import dataclasses
import functools
import random

import jax
import numpy as np
from decoding_helpers import MASK, PAD, pretrained
from flax import nnx

from marsjax.data.problems import problem
from marsjax.decoding import Generator, step
from marsjax.decoding.engine import _idle_rows

LANES = 8
MODELS = ("tiny_mars", "tiny_random")
DRAFT = {"strategy": "speculative", "k": 2}
STRATEGIES = {
    "static": {"strategy": "tree", "widths": (3, 2)},
    "dynamic": {"strategy": "tree", "k": 2, "block_complexity": 18},
    "dynamic-lookup-mean": {
        "strategy": "tree", "k": 2, "block_complexity": 18, "lookup": 3, "probe": "mean", "probe_lambda": 0.2,
        "probe_velocity": 0.9,
    },
    "chain-last": {"strategy": "chain", "k": 2, "probe": "last", "probe_velocity": 0.7},
    "static-zero": {"strategy": "tree", "widths": (2, 1), "probe": "zero"},
    "draft": DRAFT,
    "draft-masks": {"strategy": "speculative", "k": 3, "draft_window": 2, "window": 3},
    "lookup": {"strategy": "lookup", "k": 4},
    "jacobi": {"strategy": "jacobi", "k": 3},
    "block": {"strategy": "block", "cache_block": 6},
}  # fmt: skip


@functools.cache
def marked(model):
    """A `Pretrained` that knows its mask token."""
    loaded = pretrained(model)
    return loaded if model == "demo_mars" else dataclasses.replace(loaded, mask_id=MASK)


@functools.cache
def blurred(model):
    """The same model, but not quite: its drafts are often, but not always, kept."""
    decoder = nnx.clone(marked(model).model)
    scale = decoder.final_norm.scale
    scale[...] = scale[...] * (1 + 0.3 * np.random.default_rng(0).standard_normal(scale.shape).astype(np.float32))
    return dataclasses.replace(marked(model), model=decoder)


@functools.cache
def base(model, lanes=LANES):
    forbidden = None if model == "demo_mars" else (MASK, PAD)
    return Generator(marked(model), strategy="ar", prefill_chunk=16, lanes=lanes, forbidden=forbidden)


@functools.cache
def of(name, model="tiny_mars", lanes=LANES, draft=None):
    """A strategy of the table, by its name. draft: the draft model; by default a blurred copy of the model."""
    options = STRATEGIES[name]
    if options["strategy"] == "speculative":
        options = options | {"draft": marked(draft) if draft else blurred(model)}
    return base(model, lanes).with_strategy(**options)


def prompts_of(model, number, seed=0):
    """Questions of the model's language, and noise; from one token to 23."""
    draw = random.Random(seed)

    def one(i):
        if model == "demo_mars":
            return problem(seed, i, "test").question
        if model == "tiny_mars" and i % 3:
            return [50, draw.randrange(2, 12), draw.randrange(2, 12), draw.randrange(20, 24), 51]
        return [draw.randrange(2, 64) for _ in range(draw.randrange(1, 24))]

    return [one(i) for i in range(number)]


def ids(results):
    return [r.ids for r in results]


def check_types(runtime):
    """Every program leaves the types of the state as it found them: another dtype, or a weak one, and all would be
    compiled a second time in the middle of a request."""
    network, strategy, params = runtime.network, runtime.strategy, runtime.params
    controls = step.Controls(**_idle_rows(8), allowed=runtime.allowed, mask_id=runtime.mask_id)
    one = np.int32(1)
    began = jax.eval_shape(lambda: step.start.__wrapped__(network, strategy, 8, 64))
    filled = jax.eval_shape(lambda s: step.prefill.__wrapped__(network, strategy, 16, params, s, one), began)
    after = jax.eval_shape(lambda s: step.advance.__wrapped__(network, strategy, params, controls, s, one, one), began)
    larger = jax.eval_shape(lambda s: step.resize.__wrapped__(strategy, s, 96), began)

    def types(state):
        return [(jax.tree_util.keystr(p), x.dtype, x.weak_type, x.shape) for p, x in jax.tree.leaves_with_path(state)]

    assert types(filled) == types(after) == types(began)
    assert types(larger) == types(jax.eval_shape(lambda: step.start.__wrapped__(network, strategy, 8, 96)))


@contextlib.contextmanager
def quick_compilation():
    """Programs that a test needs for itself alone: compiling them well takes longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
