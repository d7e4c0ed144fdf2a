"""The demo's claims on many problems and several seeds: what MARS costs at τ = 1, what τ < 1 buys and costs.

    python benchmarks/demo_claims.py --seeds 3 --problems 2000 --out runs/claims

For every seed the demo's training is run (its data in another order), then the same held-out problems are decoded by
the AR model before MARS and by the MARS model at every τ of the demo. Differences are paired, problem by problem, with
95 % intervals of the mean difference (normal approximation). Prints markdown; writes OUT/claims.json. Runs go on where
they stopped.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import tyro

from marsjax import weights
from marsjax.data.problems import is_correct, problem
from marsjax.decoding.generator import Generator
from marsjax.demo import BATCH_SIZE, MAX_NEW_TOKENS, TAUS, assets
from marsjax.evaluation import sweep
from marsjax.training import load_config, train


def paired(after: Sequence[bool], before: Sequence[bool]) -> tuple[float, float]:
    """(mean difference, half width of its 95 % interval), in points."""
    differences = [int(a) - int(b) for a, b in zip(after, before, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    return 100 * mean, 196 * math.sqrt(variance / n)


def main(*, seeds: int = 3, problems: int = 2000, out: Path = Path("runs/claims"), held_out_seed: int = 100) -> None:
    held_out = [problem(held_out_seed, i, "test") for i in range(problems)]

    def decode(generator: Generator, tau: float | None):
        return sweep.decode(generator, held_out, tau=tau, batch_size=BATCH_SIZE, max_new_tokens=MAX_NEW_TOKENS)

    def right(results) -> list[bool]:
        return [is_correct(p, r.text or "") for p, r in zip(held_out, results, strict=True)]

    ar = right(decode(Generator(weights.load(assets() / "demo_ar"), strategy="ar"), None))
    print(f"AR before MARS: {sum(ar) / problems:.2%} of {problems} held-out problems\n")
    print("| seed | τ | accuracy | against AR before MARS | against τ = 1 | tokens per forward | phrases | numbers |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for seed in range(seeds):
        overrides = [f"model.source={assets() / 'demo_ar'}", f"output.directory={out / str(seed)}", f"data.seed={seed}"]
        export = train(load_config(assets() / "demo_mars.yaml", overrides)).export
        assert export is not None
        generator = Generator(weights.load(export), strategy="mars")
        one_token: list[bool] = []
        reference = None
        for tau in TAUS:
            results = decode(generator, tau)
            reference, one_token = reference or results, one_token or right(results)
            scored = sweep.score(generator.tokenizer, held_out, results, reference, batch_size=BATCH_SIZE)
            against_ar, against_one = paired(right(results), ar), paired(right(results), one_token)
            rows.append({"seed": seed, "tau": tau, "against_ar": against_ar, "against_one": against_one, **scored})
            print(
                f"| {seed} | {tau:g} | {scored['accuracy']:.2%} | {against_ar[0]:+.2f} ± {against_ar[1]:.2f} | "
                f"{against_one[0]:+.2f} ± {against_one[1]:.2f} | {scored['tokens_per_forward']:.2f} | "
                f"{scored['tokens_per_forward_phrases']:.2f} | {scored['tokens_per_forward_numbers']:.2f} |",
                flush=True,
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / "claims.json").write_text(
        json.dumps({"ar": sum(ar) / problems, "problems": problems, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    tyro.cli(main)
