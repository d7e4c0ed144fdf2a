from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from marsjax.data.batch import Batch, BatchFormat, align
from marsjax.training.state import rebuild
from marsjax.weights import load

CASES = Path(__file__).parents[1] / "cases"
MASK = 65


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(compiled):
    """These programs are large and run once: compile them without optimisation, and resumed runs not again."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    jax.config.update("jax_disable_most_optimizations", True)
    for name, value in zip(names, (compiled, 0.3), strict=True):
        jax.config.update(name, value)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def tiny():
    """tests/cases/tiny_random with stacked layers: `config`, `params`, and `build` which makes a decoder of params."""
    model = load(CASES / "tiny_random", layout="stacked").model
    config, params = model.config, nnx.to_pure_dict(nnx.state(model))
    return SimpleNamespace(config=config, params=params, build=lambda p, **options: rebuild(config, p, **options))


def documents_to_batch(rows, *, length, block_size, normalisation="token") -> Batch:
    """rows: a list of rows, each a list of (tokens, first supervised index) documents that start at multiples of B."""
    n = len(rows)
    tokens, segments, positions = (np.zeros((n, length), np.int32) for _ in range(3))
    supervised = np.zeros((n, length), bool)
    for r, documents in enumerate(rows):
        start = 0
        for d, (ids, first) in enumerate(documents):
            end = start + len(ids)
            tokens[r, start:end], positions[r, start:end] = ids, np.arange(len(ids))
            segments[r, start:end], supervised[r, start + first : end] = d + 1, True
            start = -(-end // block_size) * block_size
    form = BatchFormat(n, length, block_size, MASK, end_id=1, normalisation=normalisation)
    return align(tokens, supervised, positions, segments, form)


def random_documents(seed, lengths):
    rng = np.random.default_rng(seed)
    return [(rng.integers(2, 60, n), int(rng.integers(0, n))) for n in lengths]


@pytest.fixture(scope="session")
def make():
    return SimpleNamespace(batch=documents_to_batch, documents=random_documents, cases=CASES, jax=jax)
