"""What users call a strategy → slot plan and proposer."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from marsjax.decoding import plans
from marsjax.decoding.block import BlockCache, Carry
from marsjax.decoding.block_diffusion import BlockDiffusion
from marsjax.decoding.draft_loading import Draft
from marsjax.decoding.network import DecoderNetwork
from marsjax.decoding.options import OWNERS, Options
from marsjax.decoding.plans import SlotPlan
from marsjax.decoding.proposers import trees
from marsjax.decoding.proposers.draft_model import DraftModel, DraftParams
from marsjax.decoding.proposers.jacobi import Jacobi
from marsjax.decoding.proposers.lookup import Lookup
from marsjax.decoding.proposers.masks import MaskParams, Masks
from marsjax.decoding.proposers.priors import Prior, bigrams
from marsjax.decoding.proposers.probing import Probe, ProbeParams
from marsjax.decoding.proposers.sampler import DEFAULT_CANDIDATES, Sampler
from marsjax.decoding.requests import prompt_ids
from marsjax.decoding.step import Strategy

DEFAULT_WINDOW = DEFAULT_K = 4
DEFAULT_DEPTH, DEFAULT_COMPLEXITY = 2, 30
DEFAULT_LAMBDA, DEFAULT_CACHE_BLOCK = 0.1, 32


@dataclasses.dataclass(frozen=True)
class Target:
    """What a strategy must know of the model it is for. `objective`, `block_size`: of its training, if known."""

    network: DecoderNetwork
    weights: Any
    embedding: Any  # [V, D]
    tokenizer: Any = None
    mask_id: int | None = None
    block_size: int | None = None
    objective: str | None = None

    @property
    def vocab_size(self) -> int:
        return self.network.config.vocab_size


def plan_of(options: Options, block_size: int | None = None) -> SlotPlan:
    """The slot plan of some options."""
    name, trained = options.strategy, block_size
    window, k = options.window, options.k
    if name == "ar":
        return plans.ar()
    if name == "mars":
        return plans.mars(window or trained or DEFAULT_WINDOW)
    if name in ("chain", "comb"):
        return (plans.chain if name == "chain" else plans.comb)(k or trained or DEFAULT_K)
    if name == "speculative":
        return plans.speculative(k or DEFAULT_K, window or 1)
    if name in ("lookup", "jacobi"):
        return plans.drafted(k or DEFAULT_K, name)
    if name == "block":
        return plans.block(options.cache_block or DEFAULT_CACHE_BLOCK)
    if name == "block_diffusion":
        return plans.block_diffusion(options.diffusion_block or trained or DEFAULT_WINDOW)
    if options.widths is not None:
        return plans.tree(options.widths)
    depth, complexity = k or DEFAULT_DEPTH, options.block_complexity or DEFAULT_COMPLEXITY
    nodes = complexity // (depth + 1) - 1
    if nodes < depth:
        raise ValueError(
            f"block_complexity {complexity} leaves {max(nodes, 0)} drafts for a tree {depth} deep; it must be at least "
            f"{(depth + 1) ** 2}"
        )
    if (options.lookup or 0) > nodes:
        raise ValueError(f"lookup={options.lookup} is more than the tree's {nodes} drafts")
    # Where all drafts come from lookup the tree can be as deep as they are many.
    reach = max(depth, options.lookup or 0)
    example = (nodes - reach + 1, *(1,) * (reach - 1))
    return plans.tree(example, masks=depth, dynamic=True)


def check(options: Options, has_draft: bool) -> None:
    """What can be refused before any model is read."""
    if has_draft and options.strategy != "speculative":
        raise ValueError(f"a draft model is for strategy 'speculative', not for {options.strategy!r}")
    if options.strategy == "speculative" and not has_draft:
        raise ValueError("strategy 'speculative' needs a draft model: give draft")
    if options.strategy != "auto":
        plan_of(options)


def build(options: Options, target: Target, draft: Draft | None = None) -> tuple[Any, Any]:
    """(strategy, what its proposer needs as params). Warns where masks are asked beyond what they were trained for."""
    own_masks = target.network.config.own_masks
    asks_itself = target.mask_id is not None or own_masks > 0
    if options.strategy == "auto":
        options = _auto(options, target.objective or ("mtp" if own_masks > 1 else None), asks_itself)
    name = options.strategy
    plan = plan_of(options, target.block_size or (own_masks if own_masks > 1 else None))
    asks_token = options.probe is None and (plan.asks > 0 or name == "block")
    if asks_token and not asks_itself:
        probing = "say how to ask it without (probe)" if name in OWNERS["probe"] else "use 'ar'"
        raise ValueError(
            f"strategy {name!r} needs a mask token and this model has none: fine-tune it (`marsjax train` with "
            f"objective.name=mars, or mtp), or {probing}"
        )
    option = {"block": "cache_block", "block_diffusion": "diffusion_block"}.get(
        name, "window" if plan.continues else "widths" if options.widths else "k"
    )
    if asks_token and 1 < own_masks < plan.asks:
        raise ValueError(
            f"{option} asks {plan.asks} masks in a row, and this model's adapter has embeddings for {own_masks}; lower "
            f"{option}" + ("" if name not in OWNERS["probe"] else ", or say what masks are (probe)")
        )
    # MARS trains windows of up to B predictions; multi-token prediction, which counts masks, B of them.
    asked = plan.tail if plan.continues and target.objective != "mtp" else plan.asks
    if (
        asks_token
        and name not in ("block", "block_diffusion")
        and target.block_size is not None
        and asked > target.block_size
    ):
        warnings.warn(
            f"{option} {asked} is beyond the block size {target.block_size} this model was trained with: what it "
            "predicts further ahead it has never learned",
            stacklevel=4,
        )
    if name == "block":
        return BlockCache(plan.size, Carry(target.vocab_size)), ()
    if name == "block_diffusion":
        adapter = target.network.config.adapter
        if adapter is not None and adapter.gated:
            raise ValueError(
                "block_diffusion lets text see ahead in its block, which the model beside a gated adapter has never "
                "learned; use 'mars', or 'auto' for the way that the adapter was trained for"
            )
        if target.block_size not in (None, plan.pending):
            warnings.warn(
                f"blocks of {plan.pending} are not those of {target.block_size} this model was trained with",
                stacklevel=4,
            )
        return BlockDiffusion(plan.pending), ()
    if name == "jacobi":
        return Strategy(plan, Jacobi(plan.drafts)), ()
    if name == "lookup":
        return Strategy(plan, Lookup(plan.drafts)), ()
    if name in ("ar", "mars"):
        return Strategy(plan), ()
    if name == "speculative":
        assert draft is not None
        return _speculative(options, plan, draft)
    probe, probe_params = _probe(options, plan, target)
    tree: trees.Static | trees.Dynamic | None = None
    if name == "tree":
        widest = max(options.widths or (plan.drafts,))
        if widest >= target.vocab_size:
            raise ValueError(
                f"a tree of {widest} drafts at one depth needs more than the {target.vocab_size} tokens of the "
                "vocabulary; lower " + ("widths" if options.widths else "block_complexity")
            )
        tree = (
            trees.Static(options.widths)
            if options.widths
            else trees.Dynamic(plan.drafts, plan.asks, options.lookup or 0)
        )
    proposer = Masks(plan, tree, probe, _sampler(options, target))
    return Strategy(plan, proposer), MaskParams(probe_params, _prior(options, target))


def _auto(options: Options, objective: str | None, asks: bool) -> Options:
    """What a model was trained for; `asks`: whether it has masks at all."""
    if not asks:
        return dataclasses.replace(options, strategy="ar", window=None)
    if options.window is None and objective in ("block_diffusion", "mtp"):
        return dataclasses.replace(options, strategy="comb" if objective == "mtp" else "block_diffusion")
    return dataclasses.replace(options, strategy="mars")


def _sampler(options: Options, target: Target) -> Sampler | None:
    adapter = target.network.config.adapter
    if adapter is None or not adapter.sampler:
        if options.sampler or options.sampler_candidates is not None:
            option = "sampler" if options.sampler else "sampler_candidates"
            raise ValueError(f"{option} needs a model with a sampler head, and this one has none")
        return None
    if options.sampler is False:
        return None
    count = DEFAULT_CANDIDATES if options.sampler_candidates is None else options.sampler_candidates
    return Sampler(count if 0 < count < target.vocab_size else None)


def _probe(options: Options, plan: SlotPlan, target: Target) -> tuple[Probe | None, ProbeParams | None]:
    if options.probe is None:
        return None, None
    table = target.embedding
    mean, deviation = jnp.zeros(()), jnp.zeros(())
    if options.probe == "sample":
        mean, deviation = jnp.mean(table, 0, dtype=jnp.float32), jnp.std(table, 0, dtype=jnp.float32)
    rate = DEFAULT_LAMBDA if options.probe_lambda is None else options.probe_lambda
    memory = 1.0 if options.probe_velocity is None else options.probe_velocity
    return Probe(plan.asks, target.network.config.hidden_size, options.probe), ProbeParams(
        np.float32(rate), np.float32(memory), mean, deviation
    )


def _prior(options: Options, target: Target) -> Prior | None:
    if options.followers is None and options.bigrams is None:
        return None
    ids = logp = None
    if options.bigrams is not None:
        prefix = prompt_ids("?", target.tokenizer, target.vocab_size, raw=False) if target.tokenizer else []
        ids, logp = bigrams(Path(options.bigrams), target.network, target.weights, prefix, target.vocab_size)
    return Prior(None if options.followers is None else np.float32(options.followers), ids, logp)


def _speculative(options: Options, plan: SlotPlan, draft: Draft) -> tuple[Strategy, DraftParams]:
    window = options.draft_window or 1
    if window > plan.drafts:
        raise ValueError(f"draft_window={window} is more than the k={plan.drafts} drafts that are wanted")
    if draft.block_size is not None and window > draft.block_size:
        warnings.warn(
            f"draft_window {window} is beyond the block size {draft.block_size} the draft model was trained with",
            stacklevel=5,
        )
    own_masks = draft.network.config.own_masks
    if window > 1 and draft.mask_id is None and not own_masks:
        raise ValueError(f"draft_window={window} needs a draft model with a mask token, and this one has none")
    if 1 < own_masks < window - 1:
        raise ValueError(
            f"draft_window={window} asks {window - 1} masks in a row, and the draft model's adapter has embeddings for "
            f"{own_masks}; lower draft_window"
        )
    proposer = DraftModel(draft.network, plan.drafts, window, plan.tail)
    return Strategy(plan, proposer), DraftParams(draft.weights, np.int32(draft.mask_id or 0))
