"""SmolLM2-135M with its multi-token adapter on real questions: acceptance, forwards and seconds beside AR.

    python benchmarks/smollm2_mtp.py speed --model MODEL --data jsonl:gsm8k_test.jsonl [--adapter DIR] [--count 32]
    python benchmarks/smollm2_mtp.py bf16 --model MODEL --data jsonl:gsm8k_test.jsonl

The first decodes the same questions one way after the other, repeats that, and prints markdown: tokens per forward,
acceptance by depth, seconds (of each way the least of its rounds), answers equal to AR's token for token. The second
computes in bfloat16, where programs of other shapes round otherwise: how many tokens until the first difference from
AR, and how far apart the two likeliest tokens were there.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro

from marsjax import weights
from marsjax.attention.masks import single_stream_rows
from marsjax.data.sources import open_source
from marsjax.decoding.generator import Generator
from marsjax.decoding.statistics import accepted_by_depth
from marsjax.training.attend import causal_attend
from marsjax.training.evaluate import held_out_prompts

ADAPTER = Path(__file__).parents[1] / "marsjax/assets/smollm2_mtp"
TAUS = {"comb, τ = 0.9": 0.9, "comb, τ = 0.7": 0.7}  # the other ways are lossless
WAYS: dict[str, dict] = {
    "ar": {"strategy": "ar"},
    "before: probing, comb": {"strategy": "comb", "probe": "sample"},
    "comb": {"strategy": "comb"},
    "comb, masks' own drafts": {"strategy": "comb", "sampler": False},
    "chain": {"strategy": "chain"},
    "tree": {"strategy": "tree"},
    **{name: {"strategy": "comb"} for name in TAUS},
}


def _generators(model: str, adapter: Path, k: int, lanes: int, dtype=jnp.float32) -> Iterator[tuple[str, Generator]]:
    of_base = Generator.load(model, lanes=lanes, dtype=dtype, strategy="ar")
    of_both = Generator.load(model, adapter=adapter, lanes=lanes, dtype=dtype)
    for name, options in WAYS.items():
        size = {} if name == "ar" else {"k": min(k, 2) if name == "tree" else k}
        yield name, (of_base if name == "ar" or "probe" in options else of_both).with_strategy(**size, **options)


def speed(
    *, model: str, data: str, adapter: Path = ADAPTER, count: int = 32, max_new_tokens: int = 160, k: int = 4,
    lanes: int = 1, rounds: int = 2, only: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """What each way gives, in float32."""
    prompts = held_out_prompts(open_source(data), count)
    made = {name: g for name, g in _generators(model, adapter, k, lanes) if not only or name in (*only, "ar")}
    seconds, results = dict.fromkeys(made, np.inf), {}
    for timed in range(rounds + 1):  # the first compiles, for every length of the cache
        for name, generator in made.items():
            began = time.perf_counter()
            results[name] = generator.generate(prompts, max_new_tokens=max_new_tokens, tau=TAUS.get(name))
            seconds[name] = min(seconds[name], time.perf_counter() - began if timed else np.inf)
            forwards, tokens = sum(r.forwards for r in results[name]), sum(len(r.ids) for r in results[name])
            print(f"{name}: {tokens} tokens in {forwards} forwards", file=sys.stderr, flush=True)
    print(f"{count} questions, {lanes} at a time, at most {max_new_tokens} tokens each\n")
    print("| decoding | slots | tokens per forward | accepted by depth | equal to AR | s | AR's time over it |")
    print("|---" * 7 + "|")
    for name, found in results.items():
        runs = Counter(size for r in found for size in r.chunks)
        depths = " ".join(f"{share:.2f}" for share in accepted_by_depth(runs))
        mean = sum(size * count for size, count in runs.items()) / runs.total()
        equal = np.mean([a.ids == b.ids for a, b in zip(found, results["ar"], strict=True)])
        print(
            f"| {name} | {made[name].plan.size} | {mean:.2f} | {depths} | {equal:.0%} | "
            f"{seconds[name]:.1f} | {seconds['ar'] / seconds[name]:.2f} |",
            flush=True,
        )


def bf16(
    *, model: str, data: str, adapter: Path = ADAPTER, count: int = 16, max_new_tokens: int = 160, k: int = 4
) -> None:
    """Where an answer of `comb` in bfloat16 leaves that of AR in bfloat16, and the gap of the logits there."""
    prompts = held_out_prompts(open_source(data), count)
    answers = {
        name: generator.generate(prompts, max_new_tokens=max_new_tokens)
        for name, generator in _generators(model, adapter, k, count, jnp.bfloat16)
        if name in ("ar", "comb")
    }
    decoder = weights.load(model).model
    same, gaps, until = 0, [], []
    for one, several in zip(answers["ar"], answers["comb"], strict=True):
        differs = [a != b for a, b in zip(one.ids, several.ids, strict=False)]
        if not any(differs):
            same += 1
            until.append(len(one.ids))
            continue
        at = differs.index(True)
        until.append(at)
        tokens = jnp.asarray([one.prompt_ids + one.ids[:at]])
        positions = jnp.arange(tokens.shape[1])[None]
        attend = causal_attend(single_stream_rows(positions, jnp.ones_like(positions)))
        hidden, _ = decoder(tokens, positions=positions, attend=attend)
        first, second = np.sort(np.asarray(decoder.unembed(hidden[0, -1])))[::-1][:2]
        gaps.append(float(first - second))
        print(f"differs at token {at}: {one.ids[at]} and {several.ids[at]}; gap in float32 {gaps[-1]:.4f}")
    print(f"{same} of {count} answers equal throughout; tokens until the first difference (or the end): "
          f"median {np.median(until):.0f}, least {min(until)}; gap there: median {np.median(gaps) if gaps else 0:.4f}, "
          f"largest {max(gaps, default=0):.4f}")  # fmt: skip


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"speed": speed, "bf16": bf16})
