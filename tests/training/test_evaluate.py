from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.attention.masks import dense_mask, two_stream, two_stream_rows
from marsjax.decoding import generator
from marsjax.training.evaluate import (
    BINS,
    EvalSums,
    decode,
    evaluate,
    held_out_prompts,
    histogram,
    make_eval_step,
    summarize,
)
from marsjax.training.losses import RowScores
from marsjax.training.objectives import Forward
from marsjax.training.state import copy_as_list


def reference(tiny, batch, block_size):
    """Lists of (loss, hit, confidence) by stream and offset, with one dense forward and plain loops."""
    from marsjax.attention import dense

    rows = two_stream_rows(batch.positions, batch.segments, block_size)
    mask = dense_mask(two_stream, rows)

    @jax.jit
    def logits(params):
        model = tiny.build(params)
        hidden, _ = model(
            np.concatenate([batch.tokens, batch.noisy], axis=1),
            positions=rows.position,
            attend=lambda q, k, v, s: (dense.attend(q, k, v, mask), s),
        )
        return model.unembed(hidden)

    values = np.asarray(logits(tiny.params), np.float64)
    n, length = batch.tokens.shape
    found: dict = {}
    for stream, shift in (("ar", 0), ("mask", length)):
        for r in range(n):
            for t in range(length):
                if batch.weights[r, t]:
                    p = np.exp(values[r, t + shift] - values[r, t + shift].max())
                    p /= p.sum()
                    target, offset = batch.targets[r, t], 1 if stream == "ar" else batch.offsets[r, t]
                    found.setdefault((stream, int(offset)), []).append(
                        (-np.log(p[target]), p.argmax() == target, p.max())
                    )
    return found


def expected_of(triples):
    loss, hit, confidence = (np.array(x, float) for x in zip(*triples, strict=True))
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((hit - confidence)[bins == b].sum()) for b in range(BINS)]
    return {"count": len(hit), "accuracy": hit.mean(), "confidence": confidence.mean(),
            "calibration_error": sum(gaps) / len(hit), "cross_entropy": loss.mean()}  # fmt: skip


def test_by_offset(tiny, make):
    documents = make.documents(0, [15, 9, 12, 14])
    batch = make.batch([[d] for d in documents], length=16, block_size=4)
    step = make_eval_step(tiny.config, block_size=4, ar_weight=0.5, forward=Forward())
    halves = [jax.tree.map(lambda x: x[:2], batch), jax.tree.map(lambda x: x[2:], batch)]
    got = evaluate(step, tiny.params, halves, alignment=4)
    found = reference(tiny, batch, 4)
    for (stream, offset), triples in found.items():
        cell = got["ar"] if stream == "ar" else got["mask_offsets"][str(offset)]
        for name, value in expected_of(triples).items():
            np.testing.assert_allclose(cell[name], value, rtol=1e-4, atol=1e-6, err_msg=f"{stream} {offset} {name}")
    assert {int(o) for o in got["mask_offsets"]} == {o for s, o in found if s == "mask"} <= set(range(1, 6))
    total = {s: sum(t[0] for (k, _), ts in found.items() if k == s for t in ts) for s in ("ar", "mask")}
    count = got["ar"]["count"]
    np.testing.assert_allclose(got["loss_ar"], total["ar"] / count, rtol=1e-5)
    np.testing.assert_allclose(got["loss_mask"], total["mask"] / count, rtol=1e-5)
    np.testing.assert_allclose(got["loss"], got["loss_mask"] + 0.5 * got["loss_ar"], rtol=1e-9)


def test_nothing_to_evaluate(tiny):
    with pytest.raises(ValueError, match="no supervised token"):
        evaluate(None, tiny.params, [], alignment=None)


def test_prompts_end_before_the_last_answer():
    def turns(*roles):
        return [{"role": r, "content": str(i)} for i, r in enumerate(roles)]

    source = [turns("user", "assistant", "user", "assistant"), turns("assistant"), turns("user", "assistant", "user")]
    prompts = held_out_prompts(source, 9)
    assert [[m["role"] for m in p] for p in prompts] == [["user", "assistant", "user"], ["user"]]


@pytest.mark.parametrize(("objective", "block_size"), [("sft", 4), ("mars", 1)])
def test_without_masks_a_forward_gives_one_token_and_nothing_is_decoded(objective, block_size):
    def make():
        raise AssertionError("no model is needed")

    got = decode(make, [[1, 2]], objective=objective, block_size=block_size, tau=0.9, max_new_tokens=4)
    assert got == {"tokens_per_forward": 1.0}


def test_decoding_holds_one_copy_in_the_compute_dtype(tiny, monkeypatch):
    seen = {}

    class Spy:
        def __init__(self, pretrained, **options):
            seen.update(options, model=pretrained.model)

        def generate(self, prompts, **options):
            return [SimpleNamespace(forwards=2, ids=[1, 2, 3])]

    monkeypatch.setattr(generator, "Generator", Spy)
    made = copy_as_list(tiny.config, tiny.params, jnp.bfloat16)
    got = decode(lambda: SimpleNamespace(model=made), [[1]], objective="mars", block_size=4, tau=0.9,
                 max_new_tokens=4, dtype=jnp.bfloat16)  # fmt: skip
    assert got == {"tokens_per_forward": 1.5}
    assert seen["dtype"] == jnp.bfloat16
    assert seen["consume"]
    assert seen["model"].layout == "list"
    for own, kept in zip(
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(made))),
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(tiny.build(tiny.params, unroll=True)))),
        strict=True,
    ):
        assert own.dtype == jnp.bfloat16
        assert np.array_equal(own, kept.astype(jnp.bfloat16))
    for x in jax.tree.leaves(nnx.state(copy_as_list(tiny.config, tiny.params, jnp.float32))):
        x.delete()  # its own arrays, also where the dtype is the same
    assert not any(x.is_deleted() for x in jax.tree.leaves(tiny.params) if isinstance(x, jax.Array))


def test_calibration_is_by_bin():
    """Over- and underconfidence of different bins must not cancel, as they do in the mean."""
    confidence = np.array([[0.95, 0.95, 0.55, 0.55]], np.float32)
    correct = np.array([[1, 0, 1, 1]], np.float32)
    scores = RowScores(np.ones_like(correct), correct, confidence)
    table = np.asarray(histogram(scores, np.array([[1, 1, 1, 1]]), 1), np.float64)
    result = summarize(EvalSums({"loss": (4.0, 4.0)}, {"ar": table}))
    assert result["ar"]["accuracy"] == pytest.approx(0.75)
    assert result["ar"]["confidence"] == pytest.approx(0.75)
    assert result["ar"]["calibration_error"] == pytest.approx(0.5 * 0.45 + 0.5 * 0.45)
    assert result["loss"] == 1.0
