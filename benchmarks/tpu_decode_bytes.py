"""What a decode step costs on a TPU slice that is not here: bytes and flops by the TPU compiler.

    pip install libtpu
    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python benchmarks/tpu_decode_bytes.py [--topology v5e:2x2] [--batch 1 8 32]

Compiles one step of each strategy for Qwen2.5-7B in bfloat16, weights and heads of the cache split over the chips, and
prints a markdown table: bytes accessed a chip by the compiler's count and those of HBM alone (`hbm_bytes`), beside
those of `ar` at the same batch, what weights and cache alone would be, compile time. `--dump DIR` writes the programs.
"""

import argparse
import os
import re
import time
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from marsjax.decoding import network
from marsjax.decoding.options import Options
from marsjax.decoding.step import Controls, Params, start
from marsjax.decoding.strategies import Target, build
from marsjax.models import ModelConfig

QWEN_7B = ModelConfig(
    family="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28,
    num_kv_heads=4, head_dim=128, max_positions=32768, rope_theta=1e6, rope_scaling=None, norm_eps=1e-6,
    tie_embeddings=False,
)  # fmt: skip
PLANS = {
    "ar": Options("ar"),
    "mars, W = 4": Options("mars", window=4),
    "comb, k = 4": Options("comb", k=4),
}


def compiled(options: Options, batch: int, length: int, mesh: Mesh):
    """(the compiled step, seconds)."""
    net, params = network.abstract(QWEN_7B, jnp.bfloat16, mesh)
    strategy, proposer = build(options, Target(net, params, None, mask_id=0))
    state = jax.eval_shape(lambda: start(net, strategy, batch, length))
    places = net.state_sharding(params, state)
    state = jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p), state, places)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    controls = Controls(
        tau=rows(jnp.float32, batch), measure=rows(jnp.int32, batch), temperature=rows(jnp.float32, batch),
        top_k=rows(jnp.int32, batch), top_p=rows(jnp.float32, batch), seed=rows(jnp.uint32, batch),
        rejection=rows(bool, batch), limit=rows(jnp.int32, batch), ends=rows(jnp.int32, batch, 8),
        halted=rows(bool, batch), allowed=rows(bool, QWEN_7B.vocab_size), mask_id=rows(jnp.int32),
    )  # fmt: skip
    one = jax.jit(lambda p, c, s: strategy.step(net, Params(p, proposer), c, s), donate_argnums=2, out_shardings=places)
    began = time.perf_counter()
    program = one.lower(params, controls, state).compile()
    return program, time.perf_counter() - began


_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "custom-call"}


def hbm_bytes(text: str) -> int:
    """Bytes between HBM and the chip in one run of the entry computation, loops apart.

    The compiler's own count adds a weight's bytes up to three times where it is prefetched: read from HBM, written to
    the chip's memory (space 1), read there by the product.
    """
    where: dict[str, int] = {}  # bytes of an array that lies in HBM
    total = 0
    for line in text[text.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line)
        if not found:
            continue
        name, shapes, opcode, rest = found.groups()
        arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
        sizes = [_bytes(kind, dims) for kind, dims, _ in arrays]
        on_chip = ["S(1)" in layout for _, _, layout in arrays]
        where[name] = sum(size for size, chip in zip(sizes, on_chip, strict=True) if not chip)
        if opcode in _FREE or opcode.endswith("-done"):
            continue
        if opcode.endswith("-start"):
            if any(on_chip) != all(on_chip) and sizes:  # one side of the move is HBM: what moves is the smaller
                total += min(size for size in sizes if size > 4)
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        total += where[name] + sum(where.get(operand, 0) for operand in operands)
    return total


def _bytes(kind: str, dims: str) -> int:
    size = _SIZES.get(kind, 0)
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--dump", type=Path)
    args = parser.parse_args()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    mesh = Mesh(devices, ("tensor",), axis_types=(AxisType.Auto,))
    c = QWEN_7B
    chips = len(devices)
    per_layer = (
        c.hidden_size * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim + c.num_heads * c.head_dim * c.hidden_size
    )
    per_layer += 3 * c.hidden_size * c.intermediate_size
    weights = 2 * (c.num_layers * per_layer + c.vocab_size * c.hidden_size) / chips
    titles = (
        "plan",
        "batch",
        "GB accessed",
        "× ar",
        "GB of HBM",
        "× ar",
        "weights + cache, GB",
        "GFLOP",
        "cache copies",
    )
    print(f"| {' | '.join(titles)} | compile, s |\n|{'---|' * (len(titles) + 1)}")
    for batch in args.batch:
        base = None
        for name in args.plans:
            program, seconds = compiled(PLANS[name], batch, args.length, mesh)
            cost, text = program.cost_analysis(), program.as_text()
            accessed, hbm = cost["bytes accessed"], hbm_bytes(text)
            base = base or (accessed, hbm)
            cache = 2 * c.num_layers * batch * c.num_kv_heads * args.length * c.head_dim * 2 / chips
            shape = f"bf16[{batch},{max(1, c.num_kv_heads // chips)},{args.length},{c.head_dim}]"
            copies = len(re.findall(re.escape(shape) + r"\S* copy\(", text))
            print(
                f"| {name} | {batch} | {accessed / 1e9:.3f} | {accessed / base[0]:.3f} | {hbm / 1e9:.3f} | "
                f"{hbm / base[1]:.3f} | {(weights + cache) / 1e9:.3f} | {cost['flops'] / 1e9:.1f} | {copies} | "
                f"{seconds:.0f} |",
                flush=True,
            )
            if args.dump:
                args.dump.mkdir(parents=True, exist_ok=True)
                (args.dump / f"{name.split(',')[0]}_{batch}.txt").write_text(text)


if __name__ == "__main__":
    main()
