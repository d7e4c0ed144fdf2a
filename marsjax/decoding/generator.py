"""`Generator`: prompts in, results out. What users meet of the engine."""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marsjax.decoding import network, requests, strategies
from marsjax.decoding.draft_loading import load_draft
from marsjax.decoding.engine import Engine, Runtime, run_all
from marsjax.decoding.options import Options, positive
from marsjax.decoding.plans import SlotPlan
from marsjax.decoding.requests import Spec
from marsjax.decoding.result import Chunk
from marsjax.decoding.step import Params

DEFAULT_LANES = 64


class Generator:
    """Generates with one model and one strategy.

    A call of up to `lanes` prompts compiles its programs for that number of prompts and the cache length its longest
    prompt + limit needs, on their first use; a call of more is answered `lanes` at a time, each prompt taking the place
    of one that has ended. No option, prompt or length within a bucket compiles anything else.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        mask_id: int | None = None,
        draft: Any = None,
        block_size: int | None = None,
        forbidden: Sequence[int] | None = None,
        dtype: Any = jnp.float32,
        prefill_chunk: int | None = None,
        lanes: int = DEFAULT_LANES,
        consume: bool = False,
        **strategy: Any,
    ):
        """
        Args:
          model: a `marsjax.weights.Pretrained`, which brings tokenizer and ids with it, or a `models.Decoder`.
          tokenizer, eos_ids, pad_id, mask_id: what goes with a bare decoder. Without a tokenizer prompts are ids.
          draft: a draft model for strategy "speculative": a `Pretrained`, or what `load` takes.
          block_size: B of training, if known; a window beyond it warns.
          forbidden: ids never emitted, taken out of the logits before anything is chosen or measured. None: the mask,
            padding, and what the tokenizer does not know. () reproduces the paper's sampler, which leaves them in.
          dtype: compute dtype, also of the cache.
          prefill_chunk: prompt tokens a forward, at most; None: 32 on a CPU, 256 elsewhere.
          lanes: prompts answered at a time.
          consume: the model is nobody else's, so its arrays may be freed where the decode step wants another layout.
          strategy: the fields of `marsjax.decoding.options.Options`, such as strategy="comb", k=4.
        """
        options, objective = Options.of(strategy), None
        if hasattr(model, "generation"):
            pretrained, model = model, model.model
            tokenizer = pretrained.tokenizer if tokenizer is None else tokenizer
            eos_ids = eos_ids or pretrained.generation.eos_ids
            pad_id = pretrained.generation.pad_id if pad_id is None else pad_id
            mask_id = pretrained.mask_id if mask_id is None else mask_id
            trained = pretrained.hf_config.get("marsjax") or {}
            block_size, objective = block_size or trained.get("block_size"), trained.get("objective")
        self.config = model.config
        self.tokenizer = tokenizer
        self.lanes = positive("lanes", lanes)
        if prefill_chunk is not None:
            positive("prefill_chunk", prefill_chunk)
        if mask_id is not None and not 0 <= mask_id < self.config.vocab_size:
            raise ValueError(f"mask_id {mask_id} is outside the embedding table of {self.config.vocab_size} rows")
        ends = tuple(int(i) for i in eos_ids)
        embedding = model.embed_table.embedding[...]
        net, params = network.split(model, dtype, consume=consume)
        self._dtype = dtype
        self._target = strategies.Target(net, params, embedding, tokenizer, mask_id, block_size, objective)
        built, proposer_params, max_positions = self._built(options, draft)
        if prefill_chunk is None:
            prefill_chunk = 32 if net.for_cpu else 256
        self._engines: dict[int, list[Engine]] = {}  # at rest, by their number of lanes
        self.runtime = Runtime(
            network=net,
            params=Params(params, proposer_params),
            strategy=built,
            prefill_chunk=prefill_chunk,
            tokenizer=tokenizer,
            eos_ids=ends,
            mask_id=np.int32(0 if mask_id is None else mask_id),
            allowed=jnp.asarray(_allowed(self.config.vocab_size, tokenizer, ends, (mask_id, pad_id), forbidden)),
            vocab_size=self.config.vocab_size,
            max_positions=max_positions,
        )

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        adapter: str | Path | None = None,
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> "Generator":
        """From a Hugging Face directory, a hub id or a .gguf file. `options` are those of the constructor.

        `adapter`: what was trained beside the model: a directory or hub id, see `marsjax.weights.adapters`.
        `mesh`: devices to spread weights and decoding over, e.g. `parallel.sharding.make_mesh(data=2, tensor=4)`: lanes
        along `data` (their number must be a multiple of it), heads along `tensor`. None: the first device.
        """
        from marsjax import weights

        # The constructor's last parameter takes the rest, and has the name of an option in it.
        own = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
        strategy = Options.of({name: value for name, value in options.items() if name not in own})
        strategies.check(strategy, options.get("draft") is not None)
        loaded = weights.load(source, adapter=adapter, layout="list", dtype=dtype, mesh=mesh)
        return cls(loaded, dtype=dtype, consume=True, **options)

    def with_strategy(self, *, draft: Any = None, **strategy: Any) -> "Generator":
        """Another strategy on the same weights: `draft` and the fields of `Options`, as in the constructor."""
        other = copy.copy(self)
        built, params, max_positions = self._built(Options.of(strategy), draft)
        other.runtime = dataclasses.replace(
            self.runtime,
            strategy=built,
            params=Params(self.runtime.params.target, params),
            max_positions=max_positions,
        )
        other._engines = {}
        return other

    @property
    def plan(self) -> SlotPlan:
        """What one forward pass is fed."""
        return self.runtime.strategy.plan

    def generate(
        self,
        prompts: Any,
        *,
        tau: float | Sequence[float] | None = None,
        measure: str | Sequence[str] = "probability",
        max_new_tokens: int | Sequence[int] = 256,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] | None = None,
        seed: int | Sequence[int] | None = None,
        verification: str | Sequence[str] = "coupled",
        stop: str | Sequence[str] | None = (),
        stop_ids: Sequence[int] | None = (),
        ignore_eos: bool = False,
        raw: bool = False,
    ) -> Any:
        """Answers to one prompt (a `Result`) or to a list of prompts (a list of them, in the same order).

        Every row of a batch gets what it would get alone. All options but the last four may be one value or one a
        prompt.

        Args:
          prompts: a text (sent through the chat template, if there is one), a conversation (list of messages with
            role and content), token ids, or a list of any of these.
          tau: accept a prediction while its confidence is at least τ ("entropy": at most). None, 1.0 ("entropy": 0) is
            AR. Below, text comes faster and less surely. Arguments out of range raise ValueError.
          measure: confidence: "probability" of the token, "margin" between the two likeliest, "entropy" in nats.
            Of the model's own distribution at any temperature.
          max_new_tokens: limit; prompt and limit together must fit the model's positions.
          temperature: 0 is greedy, ties to the lowest id. top_k, top_p: as usual; None, 0 (or -1) and 1 keep all.
          seed: samples depend on it and on a token's position only, so equal prompts with equal seeds get equal
            answers: pass one a prompt for different ones. None draws them; each result says its own.
          verification: how drafts are verified when sampling, both ways exact in distribution. "coupled": the text of a
            seed is that of "ar". "rejection": drafts are kept with the probability the model gives them.
          stop: strings that end the answer and are not part of it. stop_ids: further end tokens, which are.
          ignore_eos: end tokens are ordinary tokens. raw: texts are not put through the chat template.
        """
        specs, single = self._specs(
            prompts, raw=raw, tau=tau, measure=measure, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, seed=seed, verification=verification, stop=stop, stop_ids=stop_ids,
            ignore_eos=ignore_eos,
        )  # fmt: skip
        if not specs:
            return []
        with self._engine(min(len(specs), self.lanes)) as engine:
            results = run_all(engine, specs)
        return results[0] if single else results

    def engine(self, lanes: int | None = None, *, max_waiting: int | None = None) -> Engine:
        """An engine of this model and strategy, to submit requests to (`spec`) while others run."""
        lanes = self.lanes if lanes is None else positive("lanes", lanes)
        groups = self.runtime.network.lane_groups
        return Engine(self.runtime, -(-lanes // groups) * groups, max_waiting=max_waiting)

    def spec(self, prompt: Any, *, raw: bool = False, **options: Any) -> Spec:
        """One prompt with its options, checked, for `Engine.submit`; options as in `generate`."""
        specs, single = self._specs(prompt, raw=raw, **options)
        if not specs:
            raise ValueError("the prompt is empty; it needs at least one token")
        if not single:
            raise ValueError(f"one prompt is wanted, got a list of {len(prompt)}")
        return specs[0]

    def stream(self, prompt: Any, *, tau: float | Callable[[], float] | None = None, **options: Any) -> Iterator[Chunk]:
        """The answer to one prompt, a `Chunk` a forward; options as in `generate`.

        `tau` may be a function, which is asked before every forward; changing τ compiles nothing.
        """
        spec = self.spec(prompt, tau=tau() if callable(tau) else tau, **options)
        return self._stream(spec, tau if callable(tau) else None)

    def _stream(self, spec: Spec, tau: Callable[[], float] | None) -> Iterator[Chunk]:
        with self._engine(1) as engine:  # once the first chunk is asked for
            yield from engine.stream(engine.submit(spec), tau=tau)

    @contextlib.contextmanager
    def _engine(self, lanes: int) -> Iterator[Engine]:
        """An engine for oneself: calls from several threads, and two streams at once, each have their own."""
        rest = self._engines.setdefault(lanes, [])
        try:
            engine = rest.pop()
        except IndexError:
            engine = self.engine(lanes)
        yield engine
        if engine.idle:  # nothing failed half way
            rest.append(engine)

    def _built(self, options: Options, draft: Any) -> tuple[Any, Any, int]:
        """(strategy, params of its proposer, positions both models have)."""
        strategies.check(options, draft is not None)
        ready = None if draft is None else load_draft(self._target, draft, self._dtype)
        built, params = strategies.build(options, self._target, ready)
        most = self.config.max_positions
        return built, params, min(most, ready.network.config.max_positions) if ready else most

    def _specs(self, prompts: Any, *, raw: bool, **options: Any) -> tuple[list[Spec], bool]:
        prompts, single = requests.split_batch(prompts)
        ids = [requests.prompt_ids(prompt, self.tokenizer, self.config.vocab_size, raw=raw) for prompt in prompts]
        specs = requests.check(
            ids,
            strategy=self.runtime.strategy,
            max_positions=self.runtime.max_positions,
            vocab_size=self.config.vocab_size,
            has_tokenizer=self.tokenizer is not None,
            eos_ids=self.runtime.eos_ids,
            **options,
        )
        return specs, single


def _allowed(
    rows: int, tokenizer: Any, ends: Sequence[int], never: Sequence[int | None], forbidden: Sequence[int] | None
) -> np.ndarray:
    """[V] bool: ids that may be emitted. An end token may, also where a checkpoint pads with it."""
    allowed = np.ones(rows, bool)
    if forbidden is None:
        if tokenizer is not None:
            known = np.fromiter(tokenizer.get_vocab().values(), np.int64)
            allowed[:] = np.isin(np.arange(rows), known)
        forbidden = [i for i in never if i is not None and i not in ends]
    outside = [i for i in (*forbidden, *ends) if not 0 <= i < rows]
    if outside:
        raise ValueError(f"forbidden ids and end tokens must lie in 0..{rows - 1} (the embedding table), got {outside}")
    allowed[list(forbidden)] = False
    if not allowed.any():
        raise ValueError(f"none of the {rows} ids may be emitted")
    return allowed
