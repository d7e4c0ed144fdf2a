"""What a decode step costs on a TPU slice that is not here: bytes and flops by the TPU compiler.

    pip install libtpu
    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python benchmarks/tpu_decode_bytes.py [--topology v5e:2x2] [--batch 1 8 32]

Compiles one step of each strategy for Qwen2.5-7B in bfloat16, weights and heads of the cache split over the chips, and
prints a markdown table: bytes accessed a chip by the compiler's count and those of HBM alone (`marsjax.parallel.hlo`),
beside those of `ar` at the same batch, what weights and cache alone would be, compile time. Branches (sampling) are
left out. `--dump DIR` writes the programs.
"""

import argparse
import os
import re
import time
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from marsjax.decoding.ahead import trace_step
from marsjax.decoding.options import Options
from marsjax.models.known import KNOWN
from marsjax.parallel.hlo import parse

PLANS = {
    "ar": Options("ar"),
    "mars, W = 4": Options("mars", window=4),
    "comb, k = 4": Options("comb", k=4),
}


def compiled(options: Options, batch: int, length: int, mesh: Mesh):
    """(the compiled step, seconds)."""
    traced, *_ = trace_step(KNOWN["Qwen/Qwen2.5-7B-Instruct"], options, batch, length, mesh)
    began = time.perf_counter()
    return traced.lower(lowering_platforms=("tpu",)).compile(), time.perf_counter() - began


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
    c = KNOWN["Qwen/Qwen2.5-7B-Instruct"]
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
            accessed, hbm = cost["bytes accessed"], parse(text).hbm_bytes(inner=False)
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
