"""The objectives that MARS is compared with, as whole runs: block diffusion, and MARS without the next-token loss."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from marsjax.decoding import Generator
from marsjax.training import ConfigError, base_model, block_diffusion, load_config, setup, train
from marsjax.training.checkpoints import Checkpoints
from marsjax.training.evaluate import evaluate
from marsjax.training.objectives import Forward, mars
from marsjax.weights import load

INIT = (
    "{family: qwen2, hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 8}"
)


def config(directory, *overrides):
    return load_config(None, [
        f"model.init={INIT}", "model.tokenizer=demo", "data.train=problems:train,count=64", "data.length=96",
        "data.batch_size=4", "optimizer.steps=4", "optimizer.learning_rate=3e-3", "optimizer.warmup=1",
        "evaluation.data=problems:validation,count=9", "evaluation.rows=5", "evaluation.every=2", "checkpoint.every=2",
        "output.log_every=1", "output.tensorboard=false", f"output.directory={directory}", *overrides,
    ])  # fmt: skip


def lines_of(result, kind):
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def final_state(directory):
    checkpoints = Checkpoints(directory / "checkpoints")
    tree = ocp.load(checkpoints.directory / str(checkpoints.steps()[-1]))
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


DECODES = ("evaluation.decode_prompts=2", "evaluation.max_new_tokens=5", "evaluation.tau=0.02")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "diffusion"
    return train(config(directory, "objective.name=block_diffusion", *DECODES))


def test_a_run_of_block_diffusion(straight):
    assert set(straight.final) == {"step", "loss", "loss_mask", "tokens_per_forward"}
    assert straight.final["step"] == 4
    assert straight.final["loss"] == straight.final["loss_mask"] > 0
    assert 1 <= straight.final["tokens_per_forward"] <= 4
    train_lines = lines_of(straight, "train")
    assert all(line["loss"] == line["loss_mask"] for line in train_lines)
    assert all("loss_ar" not in line for line in train_lines)
    exported = json.loads((straight.export / "config.json").read_text())
    assert exported["marsjax"].items() >= {"block_size": 4, "objective": "block_diffusion"}.items()
    strategy = Generator(load(straight.export)).runtime.strategy
    assert (strategy.name, strategy.block_size) == ("block_diffusion", 4)


def test_it_goes_on_with_the_masks_it_would_have_drawn(straight, tmp_path):
    stopped = train(config(tmp_path, "objective.name=block_diffusion", "checkpoint.stop_after=2"))
    assert stopped.steps == 2
    resumed = train(config(tmp_path, "objective.name=block_diffusion", *DECODES))
    assert resumed.final == straight.final
    for a, b in zip(
        jax.tree.leaves(final_state(straight.directory)), jax.tree.leaves(final_state(tmp_path)), strict=True
    ):
        assert np.array_equal(a, b)


def test_an_evaluation_draws_the_same_masks_every_time_and_others_in_every_batch(make, tiny):
    batches = [make.batch([make.documents(seed, [9, 6])], length=20, block_size=4) for seed in range(3)]
    step = block_diffusion.make_eval_step(tiny.config, block_size=4, forward=Forward())
    results = [evaluate(step, tiny.params, order, alignment=4) for order in (batches, batches, batches[::-1])]
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0]["loss"], results[2]["loss"], rtol=1e-6)
    keys = [jax.random.fold_in(jax.random.key(0), batch.tokens.sum()) for batch in batches]
    sums = [
        block_diffusion.block_diffusion(
            tiny.build(tiny.params), batch, key, block_size=4, forward=Forward(attention="dense")
        )
        for key, batch in zip(keys, batches, strict=True)
    ]
    expected = sum(s.numerator for s in sums) / sum(s.denominator for s in sums)
    np.testing.assert_allclose(results[0]["loss"], expected, rtol=1e-5)


def test_blocks_of_block_diffusion_are_whole(tmp_path):
    """The decoder feeds whole blocks; a shorter last one in training would say where the answer ends."""
    for name, filled in (("block_diffusion", True), ("mars", False)):
        settings = config(tmp_path, f"objective.name={name}", "objective.block_size=8")
        mesh = setup.make_mesh(settings)
        data = setup.load_data(settings, base_model.load_model(settings, mesh), mesh)
        with_end = [int((batch.segments != 0).sum(1)[i]) for batch in data.held_out_batches() for i in range(4)]
        assert all(size % 8 == 0 for size in with_end) == filled
        data.batches.close()


def test_the_weight_of_a_loss_that_is_not_there():
    with pytest.raises(ConfigError, match=r"objective\.ar_weight=2\.0 belongs to mars"):
        config("x", "objective.name=block_diffusion", "objective.ar_weight=2")


def test_mars_without_the_next_token_loss(tmp_path):
    result = train(config(tmp_path, "objective.ar_weight=0", *DECODES))
    for line in lines_of(result, "train"):
        assert "loss_ar" not in line
        assert line["loss"] == line["loss_mask"]
    for line in lines_of(result, "eval"):
        assert line["loss"] == line["loss_mask"]
        assert line["loss_ar"] > 0
        assert line["ar"]["count"] == sum(cells["count"] for cells in line["mask_offsets"].values()) > 0
        assert 1 <= line["tokens_per_forward"] <= 4
    assert json.loads((result.export / "config.json").read_text())["marsjax"]["objective"] == "mars"
    generator = Generator(load(result.export), lanes=1)
    assert generator.runtime.strategy.plan.name == "mars"
    prompt = [5, 6, 7]
    exact = generator.with_strategy(strategy="ar").generate(prompt, max_new_tokens=5, ignore_eos=True)
    assert generator.generate(prompt, max_new_tokens=5, ignore_eos=True).ids == exact.ids


def test_without_it_no_clean_row_meets_the_head(make, tiny):
    batch = make.batch([make.documents(6, [12])], length=12, block_size=4)
    vocab = tiny.config.vocab_size

    def program(weight):
        return str(jax.make_jaxpr(lambda: mars(tiny.build(tiny.params), batch, block_size=4, ar_weight=weight))())

    assert f"f32[24,{vocab}]" in program(0.5)
    assert f"f32[24,{vocab}]" not in program(0)
    assert f"f32[12,{vocab}]" in program(0)


def test_its_gradient_is_that_of_the_mask_loss(make, tiny):
    batch = make.batch([make.documents(7, [9, 5])], length=20, block_size=4)

    def gradient(weight):
        return jax.jit(jax.grad(lambda p: mars(tiny.build(p), batch, block_size=4, ar_weight=weight).numerator))(
            tiny.params
        )

    without, half, one = gradient(0), gradient(jnp.float32(0.5)), gradient(1.0)
    for none, some, all_ in zip(*(jax.tree.leaves(g) for g in (without, half, one)), strict=True):
        np.testing.assert_allclose(2 * some - all_, none, rtol=1e-3, atol=2e-4 * np.abs(all_).max())
