"""Held-out evaluation: loss of each stream, accuracy and calibration by mask offset, tokens per forward."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marsjax.data.pipeline import needed_target_rows
from marsjax.models import ModelConfig
from marsjax.parallel.sharding import everywhere
from marsjax.training.losses import RowScores
from marsjax.training.objectives import Forward, Scored, score_clean, score_two_streams
from marsjax.training.state import Params, rebuild
from marsjax.weights import Pretrained

BINS = 10
# Per row of a batch: what is added up in each cell [offset, bin of confidence].
_FIELDS = ("count", "correct", "confidence", "cross_entropy")


class EvalSums(NamedTuple):
    """What is added up over batches: of each mean the terms of its numerator (a number or several) and its denominator;
    and the rows by offset and confidence, see `histogram`."""

    losses: dict[str, tuple[Any, Any]]
    offsets: dict[str, Any]  # arrays of jax, and of numpy as totals


EvalStep = Callable[[Params, Any, int | None], EvalSums]  # (params, batch, noisy_length)


def make_eval_step(
    config: ModelConfig, *, block_size: int | None, forward: Forward, ar_weight: float = 1.0, unroll: bool = False
) -> EvalStep:
    """eval_step(params, batch, noisy_length) → sums over the batch.

    `block_size` None scores the clean stream alone. Offset 1 of the clean stream is the AR prediction; noisy rows have
    offsets 1 to B+1 (arXiv 2604.07023, section 3; see Batch.offsets).
    """

    def eval_step(params: Params, batch: Any, noisy_length: int | None):
        model = rebuild(config, params, unroll=unroll)
        if block_size is None:
            _, clean = score_clean(model, batch, None, forward)
            sums = clean_sums(batch, batch.weights, clean)
            return everywhere(sums._replace(losses={"loss": sums.losses["loss_ar"], **sums.losses}))
        scored = Scored(batch.weights != 0, batch.weights)
        scores = score_two_streams(
            model, batch, block_size=block_size, noisy_length=noisy_length, clean=scored, noisy=scored, forward=forward
        )
        assert scores.clean is not None
        weights, offsets = (jnp.take_along_axis(x, scores.rows, axis=1) for x in (batch.weights, batch.offsets))
        of_ar = clean_sums(batch, weights, scores.clean)
        ar, denominator = of_ar.losses["loss_ar"]
        mask = (weights * scores.noisy.cross_entropy).sum()
        both = jnp.stack([mask, ar_weight * ar])
        losses = {"loss": (both, denominator), "loss_mask": (mask, denominator), **of_ar.losses}
        cells = histogram(scores.noisy, jnp.where(weights != 0, offsets, 0), block_size + 1)
        return everywhere(EvalSums(losses, {"mask": cells, **of_ar.offsets}))

    return jax.jit(eval_step, static_argnums=2)


def clean_sums(batch: Any, weights: jax.Array, scores: RowScores) -> EvalSums:
    """Of the next-token predictions."""
    loss = (weights * scores.cross_entropy).sum(), batch.denominator.sum()
    return EvalSums({"loss_ar": loss}, {"ar": histogram(scores, (weights != 0).astype(jnp.int32), 1)})


def histogram(scores: RowScores, offsets: jax.Array, highest: int) -> jax.Array:
    """[highest + 1, BINS, fields]: sums over rows; rows of offset 0 do not count."""
    bins = jnp.clip((scores.confidence * BINS).astype(jnp.int32), 0, BINS - 1)
    cells = jnp.where(offsets > 0, offsets * BINS + bins, (highest + 1) * BINS)
    values = jnp.stack(
        [jnp.ones_like(scores.confidence), scores.correct, scores.confidence, scores.cross_entropy], axis=-1
    )
    table = jnp.zeros(((highest + 1) * BINS, len(_FIELDS))).at[cells.ravel()].add(
        values.reshape(-1, len(_FIELDS)), mode="drop"
    )  # fmt: skip
    return table.reshape(highest + 1, BINS, len(_FIELDS))


def evaluate(
    eval_step: EvalStep,
    params: Params,
    batches: Iterable[Any],
    *,
    alignment: int | None,
    place: Callable[[Any], Any] = lambda batch: batch,
) -> dict[str, Any]:
    """Runs over all batches; every row counts once (padding rows weigh nothing). See `summarize` for the result.

    `alignment`: target rows are computed in runs of so many (`ObjectiveSection.alignment`); None: the step scores all
    rows. `place` puts a batch where the parameters lie.
    """
    totals = None
    for batch in batches:
        noisy_length = None if alignment is None else needed_target_rows(batch, alignment)
        sums = eval_step(params, place(batch), noisy_length)
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)  # on the host: counts stay exact
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
    if totals is None or not all(denominator for _, denominator in totals.losses.values()):
        raise ValueError("the evaluation data holds no supervised token")
    return summarize(totals)


def summarize(totals: EvalSums) -> dict[str, Any]:
    """JSON-able: the losses, and for `ar` and each offset of `mask_offsets` (and of what else has offsets) count,
    accuracy, confidence, calibration and cross-entropy.

    `calibration_error` is the expected calibration error over ten bins of confidence:
    Σ_bins (count / all) · |accuracy - confidence|.
    """
    result: dict[str, Any] = {
        name: float(np.sum(numerator) / denominator) for name, (numerator, denominator) in totals.losses.items()
    }
    for name, table in totals.offsets.items():
        result |= {"ar": _of_cells(table[1])} if name == "ar" else {f"{name}_offsets": _by_offset(table)}
    return result


def _by_offset(table: np.ndarray) -> dict[str, dict[str, float]]:
    return {str(offset): _of_cells(cells) for offset, cells in enumerate(table) if cells[:, 0].sum()}


def _of_cells(cells: np.ndarray) -> dict[str, float]:
    count, correct, confidence, cross_entropy = cells.sum(axis=0).tolist()
    return {
        "count": int(count),
        "accuracy": correct / count,
        "confidence": confidence / count,
        "calibration_error": float(np.abs(cells[:, 1] - cells[:, 2]).sum() / count),
        "cross_entropy": cross_entropy / count,
    }


def held_out_prompts(source: Sequence[Any], count: int) -> list[list[dict[str, Any]]]:
    """Messages before the last assistant's turn of the first `count` conversations."""
    prompts = []
    for i in range(min(count, len(source))):
        messages = list(source[i])
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if messages[:-1]:
            prompts.append(messages[:-1])
    return prompts


def decode(
    make: Callable[[], Pretrained],
    prompts: Sequence[Sequence[int]],
    *,
    objective: str,
    block_size: int,
    tau: float,
    max_new_tokens: int,
    dtype: Any = jnp.float32,
) -> dict[str, float]:
    """Decodes prompts (token ids) as a model of this objective is, and says how many tokens a forward pass gave; "mtp"
    without τ, at the model's own answers.

    One token, by definition and without decoding, where a window holds no masks.
    `make` gives the model in the list layout, with arrays of its own in `dtype`: the one copy of the weights that
    decoding holds, let go of on return.
    """
    if objective == "sft" or (objective != "mtp" and block_size == 1):
        return {"tokens_per_forward": 1.0}
    from marsjax.decoding.generator import Generator

    generator = Generator(make(), dtype=dtype, consume=True)  # "auto", as its objective wants
    results = generator.generate(list(prompts), tau=None if objective == "mtp" else tau, max_new_tokens=max_new_tokens)
    forwards = sum(r.forwards for r in results)
    return {"tokens_per_forward": sum(len(r.ids) for r in results) / max(forwards, 1)}
