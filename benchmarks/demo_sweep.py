"""Any export of the demo's size by the strategy it was trained for: accuracy and tokens per forward at several τ.

    python benchmarks/demo_sweep.py --model runs/demo_block_diffusion/export --problems 128

Held-out problems as in demo_claims.py. Prints markdown.
"""

import tyro

from marsjax import weights
from marsjax.data.problems import is_correct, problem
from marsjax.decoding.generator import Generator
from marsjax.demo import BATCH_SIZE, MAX_NEW_TOKENS
from marsjax.evaluation import sweep


def main(
    *, model: str, problems: int = 128, taus: tuple[float, ...] = (1.0, 0.99, 0.95, 0.9), held_out_seed: int = 100
) -> None:
    held_out = [problem(held_out_seed, i, "test") for i in range(problems)]
    generator = Generator(weights.load(model))
    print(f"{generator.runtime.strategy.name}, {problems} problems\n\n| τ | right | tokens a forward |\n|---|---|---|")
    for tau in taus:
        results = sweep.decode(generator, held_out, tau=tau, batch_size=BATCH_SIZE, max_new_tokens=MAX_NEW_TOKENS)
        right = sum(is_correct(p, r.text or "") for p, r in zip(held_out, results, strict=True))
        rate = sum(len(r.ids) for r in results) / sum(r.forwards for r in results)
        print(f"| {tau:g} | {right / problems:.1%} | {rate:.2f} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
