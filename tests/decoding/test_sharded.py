"""Eight devices, two for the heads and four for the lanes, say what one says."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import random, sys
sys.path.insert(0, {folder!r})
import jax
from decoding_helpers import CASES, MASK, pretrained
from marsjax import weights
from marsjax.decoding import Generator
from marsjax.parallel.sharding import make_mesh

draw = random.Random(3)
prompts = [[draw.randrange(2, 64) for _ in range(draw.randrange(1, 24))] for _ in range(12)]
options = dict(max_new_tokens=[draw.randrange(1, 30) for _ in prompts], seed=range(12),
               temperature=[draw.choice((0.0, 0.8)) for _ in prompts])
for strategy in ("mars", "comb", "block_diffusion"):
    taus = {{"tau": [draw.choice((1.0, 0.9, 0.5)) for _ in prompts]}}
    more = dict(strategy=strategy, mask_id=MASK, lanes=8, prefill_chunk=8)
    one = Generator(pretrained("tiny_mars"), **more).generate(prompts, **options, **taus)
    many = Generator.load(CASES / "tiny_mars", mesh=make_mesh(data=4, tensor=2), **more)
    assert [r.ids for r in many.generate(prompts, **options, **taus)] == [r.ids for r in one], strategy
    engine = many.engine(8)
    request = engine.submit(many.spec(prompts[0], max_new_tokens=20))
    engine.turn(2)
    shard = engine._state.cache[0].k.addressable_shards[0].data.shape
    assert shard[:2] == (2, 1), shard
    assert len(engine._state.length.sharding.device_set) == 8
from adapters_helpers import with_adapter
loaded = weights.load(CASES / "tiny_mars", layout="list", mesh=make_mesh(data=4, tensor=2))
more = dict(strategy="comb", k=4, sampler_candidates=3, lanes=8, prefill_chunk=8)
one, many = (Generator(with_adapter(model), **more) for model in (pretrained("tiny_mars"), loaded))
assert [r.ids for r in many.generate(prompts, **options)] == [r.ids for r in one.generate(prompts, **options)]
print("equal")
"""


def test_eight_devices_equal_one():
    folder = Path(__file__).parent
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
           "PYTHONPATH": str(folder.parents[1])}  # fmt: skip
    code = CODE.format(folder=str(folder))
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-3000:]
    assert "equal" in said.stdout
