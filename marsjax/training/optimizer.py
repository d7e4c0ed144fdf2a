"""AdamW with linear warm-up and cosine decay."""

import jax
import jax.numpy as jnp
import optax

from marsjax.training.config import OptimizerSection

MATRICES = ("kernel", "a", "b")  # leaves of linears, and of adapters


def make_schedule(section: OptimizerSection, steps: int) -> optax.Schedule:
    """Learning rate of update 0 … steps-1: linear warm-up to the peak, then a cosine to `final_fraction` of it.

    Update i of w warm-up updates has (i + 1) / w of the peak, so that no update is wasted on a rate of 0.
    """
    warmup = round(section.warmup * steps) if section.warmup < 1 else round(section.warmup)
    peak = section.learning_rate
    cosine = optax.cosine_decay_schedule(peak, max(1, steps - warmup), alpha=section.final_fraction)
    if not warmup:
        return cosine
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)), cosine], [warmup])


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clip, Adam, decoupled weight decay of matrices, learning rate.

    Norms, biases and the embedding table do not decay: most rows of the table get no gradient from a fine-tuning set,
    and decay alone would shrink tokens the data does not hold.
    """
    parts = []
    if section.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(section.clip_norm))
    if section.moments == "factored":
        # Adafactor's square (arXiv 1804.04235): its mean over rows and over columns, kept in place of all of it.
        square = {"decay_rate": section.b2, "decay_rate_fn": _decay_rate, "epsilon": section.eps**2}
        parts.append(optax.scale_by_factored_rms(**square))
        parts.append(optax.ema(section.b1, debias=True, accumulator_dtype=jnp.bfloat16))
    else:
        mean = jnp.bfloat16 if section.moments == "bfloat16" else None
        parts.append(optax.scale_by_adam(section.b1, section.b2, section.eps, mu_dtype=mean))
    if section.weight_decay:
        parts.append(optax.add_decayed_weights(section.weight_decay, mask=decays))
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule))


def _decay_rate(step, b2):
    """Adafactor's, which begins at 0 in place of a correction of the bias, but not above b2."""
    return jnp.minimum(1 - (step + 1.0) ** -0.8, b2)


def decays(params):
    """A pytree of bools like `params`: which leaves weight decay acts on."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in MATRICES, params)
