"""Held-out evaluation: loss of each stream, accuracy and calibration by mask offset, tokens per forward."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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

EvalStep = Callable[[Params, Any, int | None], dict[str, jax.Array]]  # (params, batch, noisy_length) → sums
BINS = 10
# Per row of a batch: what is added up in each cell [offset, bin of confidence].
_FIELDS = ("count", "correct", "confidence", "cross_entropy")


def make_eval_step(config: ModelConfig, *, block_size: int | None, forward: Forward, unroll: bool = False) -> EvalStep:
    """eval_step(params, batch, noisy_length) → sums over the batch, as `summarize` takes them.

    `block_size` None scores the clean stream alone. Offset 1 of the clean stream is the AR prediction; noisy rows have
    offsets 1 to B+1 (arXiv 2604.07023, section 3; see Batch.offsets).
    """

    def eval_step(params: Params, batch: Any, noisy_length: int | None):
        model = rebuild(config, params, unroll=unroll)
        if block_size is None:
            _, clean = score_clean(model, batch, None, forward)
            return everywhere(clean_sums(batch, batch.weights, clean))
        scored = Scored(batch.weights != 0, batch.weights)
        scores = score_two_streams(
            model, batch, block_size=block_size, noisy_length=noisy_length, clean=scored, noisy=scored, forward=forward
        )
        assert scores.clean is not None
        weights, offsets = (jnp.take_along_axis(x, scores.rows, axis=1) for x in (batch.weights, batch.offsets))
        sums = {
            **clean_sums(batch, weights, scores.clean),
            "mask_numerator": (weights * scores.noisy.cross_entropy).sum(),
            "mask": histogram(scores.noisy, jnp.where(weights != 0, offsets, 0), block_size + 1),
        }
        return everywhere(sums)

    return jax.jit(eval_step, static_argnums=2)


def clean_sums(batch: Any, weights: jax.Array, scores: RowScores) -> dict[str, jax.Array]:
    return {
        "denominator": batch.denominator.sum(),
        "ar_numerator": (weights * scores.cross_entropy).sum(),
        "ar": histogram(scores, (weights != 0).astype(jnp.int32), 1),
    }


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
    block_size: int | None,
    ar_weight: float = 1.0,
    place: Callable[[Any], Any] = lambda batch: batch,
) -> dict[str, Any]:
    """Runs over all batches; every row counts once (padding rows weigh nothing). See `summarize` for the result.

    `place` puts a batch where the parameters lie.
    """
    totals: dict[str, Any] = {}
    for batch in batches:
        noisy_length = None if block_size is None else needed_target_rows(batch, block_size)
        sums = eval_step(params, place(batch), noisy_length)
        for name, value in sums.items():  # float64 on the host: counts stay exact
            totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)
    if not totals or not totals["denominator"]:
        raise ValueError("the evaluation data holds no supervised token")
    return summarize(totals, ar_weight=ar_weight)


def summarize(totals: dict[str, Any], *, ar_weight: float) -> dict[str, Any]:
    """JSON-able: loss, loss_ar, loss_mask, and for `ar` and each mask offset count, accuracy, confidence, calibration.

    `calibration_error` is the expected calibration error over ten bins of confidence:
    Σ_bins (count / all) · |accuracy - confidence|. Block diffusion has its loss alone: rows see what they predict where
    they are clean, and the masks of a block have no offsets. Of multi-token prediction the loss is that of training,
    with the ordinary rows' part; `sampler_offsets` are the sampler head's.
    """
    denominator = totals["denominator"]
    if "rows" in totals:  # multi-token prediction
        offsets = {name: _by_offset(totals[name]) for name in ("mask", "sampler") if name in totals}
        return {
            "loss": float(totals["rows_numerator"] / totals["rows"]),
            "loss_ar": float(totals["ar_numerator"] / denominator),
            **{f"{name}_offsets": cells for name, cells in offsets.items()},
            "ar": _of_cells(totals["ar"][1]),
        }
    if "ar_numerator" not in totals:
        loss = float(totals["mask_numerator"] / denominator)
        return {"loss": loss, "loss_mask": loss}
    result: dict[str, Any] = {"loss_ar": float(totals["ar_numerator"] / denominator)}
    result["loss"] = result["loss_ar"]
    if "mask" in totals:
        result["loss_mask"] = float(totals["mask_numerator"] / denominator)
        result["loss"] = result["loss_mask"] + ar_weight * result["loss_ar"]
        result["mask_offsets"] = _by_offset(totals["mask"])
    result["ar"] = _of_cells(totals["ar"][1])
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
    without τ, at exactly the model's own answers.

    One token, by definition and without decoding, where a window holds no masks.
    `make` gives the model in the list layout, with arrays of its own in `dtype`: the one copy of the weights that
    decoding holds, let go of on return.
    """
    if objective == "sft" or (objective != "mtp" and block_size == 1):
        return {"tokens_per_forward": 1.0}
    from marsjax.decoding.generator import Generator

    strategies: dict[str, dict[str, Any]] = {
        "mars": {"strategy": "mars", "window": block_size},
        "block_diffusion": {"strategy": "block_diffusion", "diffusion_block": block_size},
        "mtp": {"strategy": "comb", "k": block_size},
    }
    generator = Generator(make(), dtype=dtype, consume=True, **strategies[objective])
    results = generator.generate(list(prompts), tau=None if objective == "mtp" else tau, max_new_tokens=max_new_tokens)
    forwards = sum(r.forwards for r in results)
    return {"tokens_per_forward": sum(len(r.ids) for r in results) / max(forwards, 1)}
