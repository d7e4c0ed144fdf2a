"""Block diffusion (arXiv 2503.09573), the baseline of MARS (arXiv 2604.07023): blocks one after the other, inside a
block any order.

Two streams as in MARS; a block is `position // B` from the document's start, prompt included. Rows of a block see each
other in both directions, and in the noisy stream only some of its supervised tokens are masked: each with probability
t, t ~ U(ε, 1) drawn for every block of every document. (A block is what one run of the decoder denoises, given clean
blocks before it, so the bound on the likelihood is a sum over blocks with an expectation over t in each; one t for a
whole document has the same mean and a larger variance.) The loss of a masked token is weighted 1/t.

Logits are right-shifted, as the AR model has them: row m-1 predicts token m. For B = 4 and block k = tokens 8 to 11:

    token     7      8      9     10     11     12
    noisy    ...  [ x8    MASK   x10    MASK ]  ...        one draw
    row       7      8      9     10     11
    stream  clean  noisy  noisy  noisy  clean
    predicts  8      9     10     11     12

Inside its block the noisy row before a token predicts it. The row before a block's *first* token lies in the block
before, which the decoder has finished and committed by then: so that token is predicted by the clean row, from all
tokens before the block. (The noisy row there would see a block that is masked anew, which the decoder never has.) With
B = 1 the expected loss is that of AR fine-tuning. Position 0 is predicted by no row and never masked.
"""

from typing import Any

import jax
import jax.numpy as jnp

from marsjax.attention import masks
from marsjax.models import Decoder, ModelConfig
from marsjax.parallel.sharding import everywhere
from marsjax.training.evaluate import EvalStep, EvalSums
from marsjax.training.objectives import Forward, Scored, Sums, score_two_streams
from marsjax.training.state import Params, rebuild

LEAST_RATE = 1e-3  # ε: no weight above 1000


def block_diffusion(
    model: Decoder,
    batch: Any,
    key: jax.Array,
    *,
    block_size: int,
    noisy_length: int | None = None,
    forward: Forward,
) -> Sums:
    """The loss under masks that `key` draws: a pure function of it. `noisy_length`: see `score_two_streams`."""
    masked, rate = draw_masks(key, batch, block_size)
    return loss_of_masks(model, batch, masked, rate, block_size=block_size, noisy_length=noisy_length, forward=forward)


def draw_masks(key: jax.Array, batch: Any, block_size: int) -> tuple[jax.Array, jax.Array]:
    """(masked [..., L] bool, the rate t of each token's block [..., L]); only predicted tokens are masked."""
    for_rates, for_tokens = jax.random.split(key)
    shape = batch.tokens.shape
    # One draw a column, of which each block uses that of its first: documents may begin anywhere in a row.
    first = jnp.arange(shape[-1]) - batch.positions % block_size
    rate = jnp.take_along_axis(jax.random.uniform(for_rates, shape, minval=LEAST_RATE), first, axis=-1)
    predicted = jnp.roll(batch.weights != 0, 1, axis=-1).at[..., 0].set(False)
    return predicted & (jax.random.uniform(for_tokens, shape) < rate), rate


def loss_of_masks(
    model: Decoder,
    batch: Any,
    masked: jax.Array,
    rate: jax.Array,
    *,
    block_size: int,
    noisy_length: int | None = None,
    forward: Forward,
) -> Sums:
    """Σ over masked tokens of weight · cross-entropy / rate. masked [N, L] bool and rate [N, L] are by token."""

    def by_row(x):  # row m-1 predicts token m
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

    asked = by_row(masked)
    weights = jnp.where(asked, batch.weights / jnp.where(asked, by_row(rate), 1), 0)
    ends_block = batch.positions % block_size == block_size - 1
    scores = score_two_streams(
        model,
        batch,
        block_size=block_size,
        noisy_length=noisy_length,
        noisy_tokens=jnp.where(masked, batch.noisy, batch.tokens),
        rule=masks.block_diffusion,
        clean=Scored(asked & ends_block, weights),
        noisy=Scored(asked & ~ends_block, weights),
        forward=forward,
    )
    return Sums(scores.total, batch.denominator.sum(), {"mask": scores.total})


def make_eval_step(config: ModelConfig, *, block_size: int, forward: Forward, unroll: bool = False) -> EvalStep:
    """As `marsjax.training.evaluate.make_eval_step`: the loss alone, under masks that depend on the batch only.

    There are no offsets to tell apart: in any order a mask's distance from what is known says little.
    """

    def eval_step(params: Params, batch: Any, noisy_length: int | None):
        # The same masks at every evaluation, others in every batch, whatever their order.
        key = jax.random.fold_in(jax.random.key(0), batch.tokens.sum())
        model = rebuild(config, params, unroll=unroll)
        sums = block_diffusion(model, batch, key, block_size=block_size, noisy_length=noisy_length, forward=forward)
        loss = sums.numerator, sums.denominator
        return everywhere(EvalSums({"loss": loss, "loss_mask": loss}, {}))

    return jax.jit(eval_step, static_argnums=2)
