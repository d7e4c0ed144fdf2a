"""Every recipe of configs/ on its slice: does it fit, and how long is a step at least.

    pip install 'marsjax[tpu]'
    JAX_PLATFORMS=cpu python benchmarks/plan_recipes.py [NAME ...]

Compiles each with the TPU's compiler and prints a markdown table as they get ready. Without names: all.
"""

import argparse
import time
from pathlib import Path

from marsjax.training import load_config
from marsjax.training.plan import plan

CONFIGS = Path(__file__).parents[1] / "configs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    print(
        "| recipe | slice | GiB a chip | to spare | PFLOP | s a step, at least | utilisation, at most | planned in, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(CONFIGS.glob("*.yaml")):
        config = load_config(path)
        if config.parallel.accelerator is None or (names and path.stem not in names):
            continue
        began = time.perf_counter()
        found = plan(config)
        print(
            f"| `{path.stem}` | {found.slice.name} | {found.needed / 2**30:.1f} | {found.margin / 2**30:.1f} | "
            f"{found.flops / 1e15:.3g} | {found.step_seconds:.3g} | {found.utilisation:.0%} | "
            f"{time.perf_counter() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
