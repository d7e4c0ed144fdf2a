"""One optimiser step as one compiled program."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marsjax.models import Decoder, ModelConfig
from marsjax.models.adapters import join
from marsjax.parallel.sharding import RULES, batch_axes
from marsjax.training.objectives import Sums
from marsjax.training.state import Params, TrainState, abstract_state, rebuild, shardings

Metrics = dict[str, jax.Array]


def _as_it_is(batch: Any, key: jax.Array, target_rows: int | None) -> Any:
    return batch


class Objective(NamedTuple):
    """What a step minimises.

    loss: (model, microbatch, target_rows) → Sums.
    draw: (batch, key, target_rows) → what `loss` gets as microbatches: whatever is random, or counts rows of the whole
    batch, so that it does not depend on how the batch is cut. Leaves before and after are [A, N, ...].
    """

    loss: Callable[[Decoder, Any, int | None], Sums]
    draw: Callable[[Any, jax.Array, int | None], Any] = _as_it_is


def make_train_step(
    config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    mesh: Mesh,
    unroll: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """step(state, batch, noisy_length, frozen) → (state, metrics). The given state is donated; metrics stay on the
    devices. `frozen`: the parameters that are not trained, {} where all are (`marsjax.training.state.parted`).

    Leaves of `batch` are [A, N, ...]: A microbatches, whose numerators, denominators and gradients of numerators are
    added and divided once. `noisy_length` is static. A batch without anything supervised has loss 0 and gradients 0.
    State and batch lie on `mesh` (`place_batch`); call it under `jax.set_mesh(mesh)`.
    """
    places = shardings(abstract_state(config, optimizer), config, mesh)

    def step(state: TrainState, batch: Any, noisy_length: int | None, frozen: Params = {}):  # noqa: B006
        key, for_draw = jax.random.split(state.key)
        drawn = objective.draw(batch, for_draw, noisy_length)

        def numerator(params: Params, microbatch: Any):
            model = rebuild(config, join(frozen, params), unroll=unroll)
            sums = objective.loss(model, microbatch, noisy_length)
            return sums.numerator, sums

        def one(microbatch):
            (_, sums), gradients = jax.value_and_grad(numerator, has_aux=True)(state.params, microbatch)
            # Each device keeps the sum of its own part only, also between microbatches.
            return sums, jax.lax.with_sharding_constraint(gradients, places.params)

        if batch.tokens.shape[0] == 1:
            sums, gradients = one(_first(drawn))
        else:
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, _first(drawn)))

            def add(total, microbatch):
                return jax.tree.map(jnp.add, total, one(microbatch)), None

            (sums, gradients), _ = jax.lax.scan(add, zero, drawn)
        # The one division. Where nothing counts, numerators and their gradients are exactly 0 already.
        scale = 1 / jnp.where(sums.denominator > 0, sums.denominator, 1)
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        metrics = {
            "loss": sums.numerator * scale,
            **{f"loss_{name}": term * scale for name, term in sums.terms.items()},
            "gradient_norm": optax.global_norm(gradients),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "supervised": (batch.weights != 0).sum(),
            "tokens": (batch.segments != 0).sum(),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1, key), metrics

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        donate_argnums=0,
        static_argnums=2,
        out_shardings=(places, everywhere),
        compiler_options=compiler_options,
    )


def _first(tree):
    return jax.tree.map(lambda x: x[0], tree)


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    """Of arrays [A, N, ...] with N = `rows` rows a microbatch. Raises ValueError where the devices do not divide N."""
    axes = batch_axes(mesh, rows)
    devices = math.prod(mesh.shape.get(axis, 1) for axis in RULES["batch"])
    if devices > 1 and not axes:
        sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in RULES["batch"] if mesh.shape.get(axis, 1) > 1)
        raise ValueError(
            f"a microbatch of {rows} rows (data.batch_size / data.accumulation) is no multiple of the {devices} groups "
            f"of devices that share it ({sizes}); raise data.batch_size to one, or lower data.accumulation"
        )
    return NamedSharding(mesh, PartitionSpec(None, axes or None))


def local_rows(sharding: NamedSharding, accumulation: int, rows: int) -> list[int]:
    """Which of the A · N rows of a step lie on this process's devices, ascending."""
    here = sharding.addressable_devices_indices_map((accumulation, rows)).values()
    columns = sorted({column for index in here for column in range(*index[1].indices(rows))})  # type: ignore[index]
    return [a * rows + column for a in range(accumulation) for column in columns]


def place_batch(batch: Any, accumulation: int, rows: int, sharding: NamedSharding) -> Any:
    """[local rows, ...] leaves, as `local_rows` lists them, → global arrays [A, N, ...]."""

    def place(x):
        x = np.reshape(x, (accumulation, len(x) // accumulation, *x.shape[1:]))
        return jax.make_array_from_process_local_data(sharding, x, (accumulation, rows, *x.shape[2:]))

    return jax.tree.map(place, batch)


def place_whole(batch: Any, mesh: Mesh) -> Any:
    """[N, ...] leaves that every process holds in full → global arrays, split along the mesh as far as it divides N."""

    def place(x):
        sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, len(x)) or None))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)
