"""Plans by the TPU's compiler, and what can be checked of every configuration without it."""

import dataclasses
import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from marsjax.decoding.options import Options
from marsjax.models.adapters import is_adapter
from marsjax.models.layout import abstract
from marsjax.parallel import ahead, flops, hlo
from marsjax.parallel.slices import parse_slice
from marsjax.training import load_config, plan_table, setup
from marsjax.training import plan as planning
from marsjax.training.config import ConfigError
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import abstract_frozen, abstract_state

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
FOR_SLICES = [path for path in CONFIGS if load_config(path).parallel.accelerator]
compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU's compiler is not installed: pip install 'marsjax[tpu]'"
)


@pytest.mark.parametrize(
    ("name", "chips", "topology"),
    [("v4-64", 32, "v4:2x4x4"), ("v5p-32", 16, "v5p:2x2x4"), ("v5e-64", 64, "v5e:8x8"), ("v6e-16", 16, "v6e:4x4"),
     ("v5litepod-16", 16, "v5e:4x4"), ("V5P:4x4x8", 128, "v5p:4x4x8"), ("v5p-128", 64, "v5p:4x4x4")],
)  # fmt: skip
def test_slices_by_name(name, chips, topology):
    found = parse_slice(name)
    assert (found.chips, found.topology) == (chips, topology)
    assert parse_slice(found.name).chips == chips


@pytest.mark.parametrize(
    ("name", "words"),
    [("v5p", "is no TPU slice; write v5p-32"), ("v3-8", "unknown TPU generation v3; known are v4"),
     ("v5p-17", "known are v5p-8, v5p-16"), ("v5e:2x2x2", "a v5e slice has 2 dimensions"), ("", "is no TPU slice")],
)  # fmt: skip
def test_slices_that_are_none(name, words):
    with pytest.raises(ValueError, match=words):
        parse_slice(name)


def _mesh(config):
    slice_ = parse_slice(config.parallel.accelerator)
    sizes = {**config.parallel.sizes, "fsdp": slice_.chips}
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


@pytest.mark.parametrize("path", FOR_SLICES, ids=lambda p: p.stem)
def test_every_recipe_divides_over_its_slice(path):
    """Batch and model over the mesh; its state beside what a sum over its parameters says, and within the HBM."""
    config = load_config(path)
    model, mesh = planning.model_config(config), _mesh(config)
    setup.check_mesh(config, model, mesh)
    assert config.row_length % config.objective.alignment == 0
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 100))
    state, frozen = abstract_state(model, optimizer, mesh), abstract_frozen(model, jnp.bfloat16, mesh)
    held = planning.state_bytes(state, frozen)
    # Independently: a matrix has one dimension of hidden_size, split over all chips; the rest is everywhere.
    chips, trained, still = math.prod(mesh.shape.values()), 0, 0
    for path_, variable in abstract(model)[1].flat_state():
        shape = variable.get_raw_value().shape
        size = math.prod(shape) // (chips if _is_split(path_, shape, model) else 1)
        if model.adapter is not None and not is_adapter(path_):
            still += 2 * size
        else:
            trained += 4 * size
    assert held["parameters"] == trained + still
    assert 2 * trained <= held["moments"] <= 2 * trained + 64
    assert sum(held.values()) < parse_slice(config.parallel.accelerator).chip.hbm / 2


def _is_split(path, shape, model):
    if "adapter" in path:  # A leads from, or B to, the hidden size
        return (path[-1] == "a") == (path[-3] in ("q", "k", "v", "gate", "up"))
    if is_adapter(path):
        return path[0] == "masks" or "norm" not in path[1]
    ends = shape[0] == model.vocab_size or len(shape) > 2 or shape[-1] == model.vocab_size
    return len(shape) >= 2 and model.hidden_size in shape[-2:] and ends


def test_known_shapes_are_the_published_ones():
    """Parameters, from the models' cards."""
    counts = {"Qwen/Qwen2.5-0.5B-Instruct": 0.494, "Qwen/Qwen2.5-7B-Instruct": 7.616, "Qwen/Qwen3-8B": 8.191,
              "meta-llama/Llama-3.1-8B-Instruct": 8.030, "allenai/Llama-3.1-Tulu-3-8B-SFT": 8.030,
              "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345}  # fmt: skip
    for name, billions in counts.items():
        params = jax.tree.leaves(abstract(planning.KNOWN[name])[1])
        assert sum(math.prod(x.shape) for x in params) / 1e9 == pytest.approx(billions, abs=6e-4), name


def test_flops_count_loops_and_devices():
    def body(x, w):
        return jnp.tanh(x @ w), None

    def f(x, ws):
        return jax.lax.scan(jax.checkpoint(body), x, ws)[0].sum()

    x, ws = jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))
    product = 2 * 8 * 16 * 16
    assert flops.count(jax.make_jaxpr(f)(x, ws)) == 5 * product
    # Backward: the two gradients, and the forward product once more.
    assert flops.count(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(x, ws)) == 5 * (1 + 1 + 2) * product


def test_kernels_of_masks_and_of_text_are_told_apart():
    """Also where there are as many masks as columns; a gated adapter saves the gradients of the text's keys."""

    def flops_of(name, keys, gated=True):
        config = load_config(CONFIGS[0].parent / "tulu3_8b_mtp.yaml", [f"adapter.gated={str(gated).lower()}"])
        assert config.objective.block_size * config.objective.anchors == config.row_length == 1024
        shapes = [(8, 32, 1024, 128), (8, 8, keys, 128), (8, 8, keys, 128), (8, 1024, 128), (8, 8, keys)]
        invars = [SimpleNamespace(aval=SimpleNamespace(shape=shape)) for shape in shapes]
        equation = SimpleNamespace(params={"name_and_src_info": name}, invars=invars)
        return planning._kernel_flops(config, planning.model_config(config), 1024)(equation)

    product = 2 * 8 * 32 * 128
    assert flops_of("fwd", 1024) == 2 * product * 3 * 512**2  # of four tiles of 512 the one above the diagonal is empty
    # Masks visit that part of themselves, and, since anchors may stand anywhere, nearly all of the text.
    assert 2 * product * (3 * 512**2 + 1024**2 / 2) < flops_of("fwd", 2048) <= 2 * product * 2 * 1024**2
    assert flops_of("dkv", 2048) < flops_of("dkv", 2048, gated=False) == 2 * flops_of("fwd", 2048)


def test_program_text():
    """Loops count as often as they run, collectives by the bytes they send."""
    text = """HloModule m
%cond (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %n = s32[] constant(7)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%body (p.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p.1), index=1
  %g = f32[32,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %r = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i.1, %r)
}
ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %c = f32[8,4]{1,0} copy(%a)
  %w = (s32[], f32[8,4]{1,0}) while(%t0), condition=%cond, body=%body
  ROOT %o = f32[8,4]{1,0} get-tuple-element(%w), index=1
}
"""
    program = hlo.parse(text)
    assert program.runs() == {"main": 1, "body": 7}
    found = {c.kind: c for c in program.collectives()}
    assert (found["all-gather"].count, found["all-gather"].group, found["all-gather"].wire) == (7, 4, 7 * 512 * 3 / 4)
    assert (found["all-reduce"].count, found["all-reduce"].wire) == (7, 7 * 2 * 128 * 3 / 4)
    assert program.hbm_bytes() == 2 * 128 + 7 * (512 + 128) + 7 * 2 * 128


def _recipe(name, *overrides):
    return load_config(CONFIGS[0].parent / f"{name}.yaml", overrides)


@pytest.fixture(scope="module")
def mars_7b():
    return planning.plan(_recipe("qwen2.5_7b_mars_b4"))


@compiler
def test_7b_fits_and_its_program_is_as_it_should(mars_7b):
    assert mars_7b.fits
    assert mars_7b.margin > 50 * 2**30
    assert mars_7b.memory["parameters"] == pytest.approx(7615616512 * 4 / 16, rel=1e-3)
    assert 0.5 < mars_7b.utilisation < 1
    program = hlo.parse(mars_7b.program)
    shapes = {(array.kind, array.shape) for array in program.arrays()}
    two_l, vocab = 1024, 152064
    assert any(vocab in shape for _, shape in shapes)
    assert not [s for s in shapes if two_l in s[1] and vocab in s[1]]
    assert not [s for s in shapes if s[0] == "pred" and s[1].count(two_l) >= 2]
    stacks = {
        tuple(sorted(v.get_raw_value().shape))
        for path, v in abstract(planning.KNOWN["Qwen/Qwen2.5-7B-Instruct"])[1].flat_state()
        if path[0] == "layers" and len(v.get_raw_value().shape) == 3
    }
    gathered = [c.arrays for c in program.collectives() if c.kind == "all-gather"]
    assert gathered
    for arrays in gathered:
        dims = tuple(sorted(int(d) for d in arrays.split("[")[1].split("]")[0].split(",")))
        assert dims not in stacks, arrays


@compiler
def test_table_and_json(mars_7b):
    text = plan_table.show(mars_7b)
    for words in (
        "v5p-32 (v5p:2x2x4): 16 chips, mesh fsdp 16",
        "fits, ",
        "to spare",
        "all-gather",
        "utilisation at most",
    ):
        assert words in text
    assert json.loads(json.dumps(mars_7b.to_dict()))["fits"] is True


@compiler
@pytest.mark.parametrize(
    "name",
    ["qwen2.5_0.5b_sft", "qwen2.5_0.5b_mars_b8", "qwen2.5_0.5b_block_diffusion", "qwen2.5_7b_sft",
     "qwen2.5_7b_block_diffusion", "qwen2.5_0.5b_mtp", "qwen2.5_0.5b_mars_gated"],
)  # fmt: skip
def test_each_objective_compiles_and_fits(name):
    found = planning.plan(_recipe(name))
    assert found.fits
    assert found.flops >= found.model_flops


@compiler
def test_a_decode_step():
    found = planning.plan_decode(
        _recipe("qwen2.5_0.5b_mars_b4"), parse_slice("v5e-4"), options=Options("mars", window=4)
    )
    assert found.fits
    assert found.memory["parameters"] >= 2 * 0.494e9 / 2
    assert found.seconds["HBM"] > found.seconds["compute"]  # what makes several tokens a forward worth it


@compiler
def test_what_cannot_fit_is_refused():
    """State that is larger than a chip, at the command's exit code."""
    command = [sys.executable, "-m", "marsjax.cli", "plan", str(CONFIGS[0].parent / "qwen2.5_7b_mars_b4.yaml"),
               "--topology", "v5e-4", "data.batch_size=4"]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1, said.stderr[-2000:]
    assert "DOES NOT FIT" in said.stdout


def _fake(step_seconds, needed):
    """A plan that says what it is told, of the configuration it is given."""

    def make(config, slice_):
        sizes = {**config.parallel.sizes}
        rows = config.data.batch_size / config.data.accumulation / sizes["fsdp"]
        return planning.Plan(
            slice_, 1, sizes, {"accumulation": config.data.accumulation}, 1.0, 1,
            {"parameters": 1.0, "moments": 2.0, "temporaries": needed(sizes, rows) - 3.0},
            needed(sizes, rows), 1.0, 1.0,
            1.0, [], {"compute": step_seconds(sizes)}, 1.0,
        )  # fmt: skip

    return make


def test_search_lowers_microbatches_until_they_fit_and_takes_the_quickest(monkeypatch):
    gib = 2.0**30
    fake = _fake(lambda sizes: 1.0 + 0.1 * sizes["tensor"], lambda sizes, rows: 3.0 + rows * 6 * gib)
    monkeypatch.setattr(planning, "plan", fake)
    config = _recipe("qwen2.5_7b_mars_b4")
    found = list(planning.search(config, parse_slice("v5e-64")))
    assert [(p.mesh["fsdp"], p.mesh["tensor"], p.work["accumulation"], p.fits) for p in found] == [
        (64, 1, 1, False), (64, 1, 3, True), (32, 2, 1, False), (32, 2, 6, True), (16, 4, 1, False), (16, 4, 12, True),
    ]  # fmt: skip
    best = planning.best(found)
    assert best is found[1]
    assert plan_table.choice(best, 6).startswith("best of 6: parallel.data=1 parallel.fsdp=64 parallel.tensor=1")
    assert plan_table.choice(planning.best(found[:1]), 1) == "none of 1 fits"


def test_what_is_no_number_is_null_in_json():
    slice_ = parse_slice("v5p-8")
    nothing = planning.Plan(
        slice_, 1, {}, {}, 1.0, 1, {"parameters": 1.0}, math.inf, 1.0, 1.0, math.nan, [], {}, math.nan
    )
    text = json.dumps(nothing.to_dict(), allow_nan=False)
    assert json.loads(text) | {"needed": None, "hbm_bytes": None, "margin": None} == json.loads(text)


@compiler
def test_7b_fits_a_v4_64_and_two_slices_make_a_mesh():
    assert planning.plan(_recipe("qwen2.5_7b_mars_b4"), parse_slice("v4-64")).margin > 10 * 2**30
    config = _recipe("qwen2.5_7b_mars_b4", "parallel.slice=2")
    mesh = setup.make_mesh(config, ahead.devices(parse_slice("v5e-16"), 2))
    assert dict(mesh.shape) == {"slice": 2, "data": 1, "fsdp": 16, "tensor": 1}
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]


def test_errors():
    with pytest.raises(ConfigError, match="which slice"):
        planning.plan(_recipe("qwen2.5_7b_mars_b4", "parallel.accelerator=null"))
    config = _recipe("qwen2.5_7b_mars_b4")
    model = planning.model_config(config)
    mesh = jax.sharding.AbstractMesh((2, 8), ("fsdp", "tensor"))
    with pytest.raises(ConfigError, match=r"tensor=8 does not divide this model's num_heads=28, num_kv_heads=4"):
        setup.check_mesh(config, model, mesh)
    odd = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=100))
    with pytest.raises(ConfigError, match=r"100 rows .* no multiple of the 16 groups"):
        setup.check_mesh(odd, model, _mesh(config))
