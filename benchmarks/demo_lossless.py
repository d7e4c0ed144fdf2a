"""What self-verification gives on the demo's MARS model: AR's own answers in fewer forwards, and the mixture with τ.

    marsjax demo && python benchmarks/demo_lossless.py --model demo-out/training/export [--problems 512]

Decodes the same held-out problems with every strategy and prints markdown: answers right, answers equal to AR's token
for token, tokens per forward and per second, acceptance by depth.
"""

from collections import Counter
from pathlib import Path

import tyro

from marsjax import weights
from marsjax.data.problems import problem
from marsjax.decoding.generator import Generator
from marsjax.decoding.statistics import accepted_by_depth
from marsjax.evaluation import sweep

TAUS = (1.0, 0.999, 0.995, 0.99, 0.95, 0.9, 0.8)
LANES = 64


def main(*, model: Path = Path("demo-out/training/export"), problems: int = 512, held_out_seed: int = 100) -> None:
    pretrained = weights.load(model)
    held_out = [problem(held_out_seed, i, "test") for i in range(problems)]
    rows = [("ar", {"strategy": "ar"}, (None,))]
    rows += [(f"{name}, k = {k}", {"strategy": name, "k": k}, (None,)) for name in ("chain", "comb") for k in (2, 3, 4)]
    rows += [("comb, k = 4", {"strategy": "comb", "k": 4}, TAUS[1:]), ("mars, W = 4", {"strategy": "mars"}, TAUS)]
    print("| strategy | τ | right | equal to AR | tokens per forward | tokens per second | accepted by depth |")
    print("|---" * 7 + "|")
    reference = None
    for name, options, taus in rows:
        generator = Generator(pretrained, lanes=LANES, **options)
        for tau in taus:
            results = sweep.decode(generator, held_out, tau=tau, batch_size=LANES, max_new_tokens=96)
            reference = reference or results
            scored = sweep.score(generator.tokenizer, held_out, results, reference, batch_size=LANES)
            runs = Counter(size for r in results for size in r.chunks)
            depths = " ".join(f"{share:.2f}" for share in accepted_by_depth(runs))
            print(
                f"| {name} | {1.0 if tau is None else tau:g} | {scored['accuracy']:.1%} | "
                f"{scored['identical_to_ar']:.1%} | {scored['tokens_per_forward']:.2f} | "
                f"{scored['tokens_per_second']:,.0f} | {depths} |",
                flush=True,
            )


if __name__ == "__main__":
    tyro.cli(main)
