"""One optimiser step as one compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from marsjax.models import ModelConfig
from marsjax.training.objectives import Sums
from marsjax.training.state import Params, TrainState, rebuild

Objective = Callable[..., Sums]  # (model, batch, key, noisy_length) → Sums
Metrics = dict[str, jax.Array]


def make_train_step(
    config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    unroll: bool = False,
) -> Callable[[TrainState, Any, int | None], tuple[TrainState, Metrics]]:
    """step(state, batch, noisy_length) → (state, metrics). The given state is donated; metrics stay on the device.

    Leaves of `batch` are [A, N, ...]: A microbatches, whose numerators, denominators and gradients of numerators are
    added and divided once. `noisy_length` is static. A batch without anything supervised has loss 0 and gradients 0.
    """

    def numerator(params: Params, batch: Any, key: jax.Array, noisy_length: int | None):
        sums = objective(rebuild(config, params, unroll=unroll), batch, key, noisy_length)
        return sums.numerator, sums

    def step(state: TrainState, batch: Any, noisy_length: int | None):
        key, drawn = jax.random.split(state.key)
        accumulation = batch.tokens.shape[0]

        def one(microbatch, key):
            (_, sums), gradients = jax.value_and_grad(numerator, has_aux=True)(
                state.params, microbatch, key, noisy_length
            )
            return sums, gradients

        keys = jax.random.split(drawn, accumulation)
        if accumulation == 1:
            sums, gradients = one(jax.tree.map(lambda x: x[0], batch), keys[0])
        else:
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *_first((batch, keys))))

            def add(total, slice_):
                return jax.tree.map(jnp.add, total, one(*slice_)), None

            (sums, gradients), _ = jax.lax.scan(add, zero, (batch, keys))
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

    return jax.jit(step, donate_argnums=0, static_argnums=2)


def _first(tree):
    return jax.tree.map(lambda x: x[0], tree)


def split_microbatches(batch: Any, accumulation: int) -> Any:
    """[N, ...] leaves → [A, N / A, ...]."""
    return jax.tree.map(lambda x: np.reshape(x, (accumulation, len(x) // accumulation, *x.shape[1:])), batch)
