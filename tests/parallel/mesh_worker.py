"""Five optimiser steps over several meshes of eight CPU devices, gradients kept: `python mesh_worker.py OUT.npz`.

What `test_training_mesh.py` compares; a program of its own, since a process has one number of devices.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from flax import nnx

from marsjax.models.adapters import attach, join
from marsjax.models.config import AdapterConfig
from marsjax.models.layout import from_params
from marsjax.parallel.sharding import make_mesh
from marsjax.training import setup
from marsjax.training.config import ObjectiveSection, OptimizerSection
from marsjax.training.objectives import Forward
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import new_state, parted
from marsjax.training.step import Objective, batch_sharding, make_train_step, place_batch
from marsjax.weights import load

_spec = importlib.util.spec_from_file_location("helpers", Path(__file__).parents[1] / "training" / "conftest.py")
helpers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(helpers)

STEPS, RATE, ROWS, LENGTH, BLOCK = 5, 1e-3, 16, 28, 4
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}
RUNS: dict[str, dict] = {  # the first of an objective is what its others are compared with
    "mars, one device": {"mesh": {"fsdp": 1}},
    "mars, data=8": {"mesh": {"data": 8}},
    "mars, fsdp=8": {"mesh": {"fsdp": 8}},
    "mars, data=2 fsdp=2 tensor=2": {"mesh": MIXED},
    "mars, slice=2 fsdp=4": {"mesh": {"slice": 2, "fsdp": 4}},
    "mars, fsdp=4 tensor=2, accumulation 2": {"mesh": {"fsdp": 4, "tensor": 2}, "accumulation": 2},
    "mars, splash": {"mesh": {"fsdp": 2, "tensor": 2}, "attention": "splash", "steps": 1},
    "sft, one device": {"mesh": {"fsdp": 1}, "steps": 2},
    "sft, data=2 fsdp=2 tensor=2": {"mesh": MIXED, "steps": 2},
    "block_diffusion, one device": {"mesh": {"fsdp": 1}, "steps": 2},
    "block_diffusion, data=2 fsdp=2 tensor=2": {"mesh": MIXED, "steps": 2},
    "mtp, one device": {"mesh": {"fsdp": 1}, "steps": 2},
    "mtp, data=2 fsdp=2 tensor=2, accumulation 2": {"mesh": MIXED, "steps": 2, "accumulation": 2},
    "mtp, splash": {"mesh": {"fsdp": 2, "tensor": 2}, "attention": "splash", "steps": 1},
}
ADAPTER = AdapterConfig(rank=4, alpha=8.0, masks=BLOCK, sampler=True)
# Adam divides by the root of the square plus eps: with 1e-8 it makes whole updates of rounding errors where gradients
# are near 0, and the next step's gradients would differ by what those did.
SECTION = OptimizerSection(learning_rate=RATE, warmup=2, weight_decay=0.1, eps=1e-6)


def keep_gradients() -> optax.GradientTransformation:
    """Whose state is the gradients it was given, so that they come out of the real step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params), lambda gradients, _, params=None: (gradients,) * 2
    )


def batches(steps: int):
    """Rows of one document, of every length, and of two."""
    for step in range(steps):
        one = helpers.random_documents(step, range(9, 9 + ROWS - 2))
        two = helpers.random_documents(step + 100, (13, 11, 5, 20))
        rows = [*([document] for document in one), two[:2], two[2:]]
        yield helpers.documents_to_batch(rows, length=LENGTH, block_size=BLOCK)


def make_objective(name: str, forward: Forward) -> Objective:
    section = ObjectiveSection(name=name, block_size=BLOCK, anchors=5 if name == "mtp" else None)
    return setup.make_objective(SimpleNamespace(objective=section), forward)


def with_adapter(model, mesh):
    """With a random adapter: of one that is new, A gets no gradient."""
    model, rng = attach(model, ADAPTER, mesh=mesh), np.random.default_rng(0)
    trained, frozen = parted(model.config, nnx.to_pure_dict(nnx.state(model)))
    trained = jax.tree.map(
        lambda x: jax.device_put(rng.normal(0, 0.1, x.shape).astype(np.float32), x.sharding), trained
    )
    return from_params(model.config, join(frozen, trained))


def run(name: str, mesh: dict, accumulation: int = 1, attention: str = "blocks", steps: int = STEPS) -> dict:
    """{(kind, step, name): array} of metrics, gradients (step by step) and parameters (at the end)."""
    mesh, rows = make_mesh(**mesh), ROWS // accumulation
    pretrained = load(helpers.CASES / "tiny_random", layout="stacked", mesh=mesh)
    if name.startswith("mtp"):
        pretrained.model = with_adapter(pretrained.model, mesh)
    config, schedule = pretrained.model.config, make_schedule(SECTION, STEPS)
    frozen = parted(config, nnx.to_pure_dict(nnx.state(pretrained.model)))[1]
    optimizer = optax.chain(keep_gradients(), make_optimizer(SECTION, schedule))
    forward = Forward(attention=attention, chunk_bytes=4 * 72 * 20, interpret=True)
    objective = make_objective(name.partition(",")[0], forward)
    step = make_train_step(config, objective, optimizer, schedule, mesh=mesh)
    state, out = new_state(pretrained.model, optimizer, 0, mesh), {}
    for i, batch in enumerate(batches(steps)):
        placed = place_batch(batch, accumulation, rows, batch_sharding(mesh, rows))
        with jax.set_mesh(mesh):
            state, metrics = step(state, placed, LENGTH, frozen)
        out |= {("metric", i, key): value for key, value in metrics.items()}
        out |= {("gradient", i, key): value for key, value in flat(state.opt_state[0])}
    out |= {("parameter", steps - 1, key): value for key, value in flat(state.params)}
    parts = [len({str(shard.index) for shard in x.addressable_shards}) for x in jax.tree.leaves(state.params)]
    return {key: np.asarray(value) for key, value in out.items()} | {("parts", 0, "most"): np.array(max(parts))}


def flat(tree):
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def main(path: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    found = {name: run(name, **options) for name, options in RUNS.items()}
    np.savez(path, **{"|".join((name, *map(str, key))): x for name, out in found.items() for key, x in out.items()})


if __name__ == "__main__":
    main(sys.argv[1])
