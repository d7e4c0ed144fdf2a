"""A draft model beside its target: read, compared, checked."""

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from marsjax.decoding.network import DecoderNetwork, split

if TYPE_CHECKING:
    from marsjax.decoding.strategies import Target

FEW_TOKENS = 4  # more than the other, such as a mask, that a tokenizer of the same family may have however small it is


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft model, ready to run."""

    network: DecoderNetwork
    weights: Any
    mask_id: int | None
    block_size: int | None = None


def load_draft(target: "Target", source: Any, dtype: Any) -> Draft:
    """A draft model, checked: a `marsjax.weights.Pretrained`, or what `marsjax.weights.load` takes.

    Refuses one that does not share the target's vocabulary, or whose weights are not all finite.
    """
    from marsjax import weights

    if hasattr(source, "runtime"):
        raise TypeError("draft must be the path of a model, or what marsjax.weights.load gives, not a Generator")
    places = getattr(target.embedding, "sharding", None)
    mesh = cast(Mesh, places.mesh) if isinstance(places, NamedSharding) else None
    loaded = source if hasattr(source, "generation") else weights.load(source, layout="list", dtype=dtype, mesh=mesh)
    _check_vocabulary(target, loaded)
    theirs, ours = (x.devices() for x in (loaded.model.embed_table.embedding[...], target.embedding))
    if theirs != ours:
        raise ValueError(
            f"the draft model lies on {len(theirs)} devices and the target on {len(ours)} others: load both onto the "
            "same mesh, or give the draft model's path"
        )
    for path, value in nnx.to_flat_state(nnx.state(loaded.model)):
        if not bool(jnp.isfinite(value[...]).all()):
            raise ValueError(f"the draft model's weight {'.'.join(map(str, path))} is not finite; its file is damaged")
    net, params = split(loaded.model, dtype, consume=source is not loaded)
    return Draft(net, params, loaded.mask_id, (loaded.hf_config.get("marsjax") or {}).get("block_size"))


def _check_vocabulary(target: "Target", draft: Any) -> None:
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != (rows := draft.model.config.vocab_size):
            raise ValueError(
                f"the draft model's vocabulary has {rows} rows and the target's {target.vocab_size}, and there are not "
                "two tokenizers to compare; use models of one family"
            )
        return
    ours, theirs = ({i: t for t, i in x.get_vocab().items()} for x in (target.tokenizer, draft.tokenizer))
    # What only one of them has, such as a mask, is no harm: it is never proposed, or proposed and not taken.
    differ = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if differ or abs(len(ours) - len(theirs)) > max(FEW_TOKENS, 0.01 * len(ours)):
        first = differ[0] if differ else -1
        example = f", such as id {first}: {theirs.get(first)!r} in the draft, {ours.get(first)!r} in the target"
        raise ValueError(
            f"the draft model has another vocabulary ({len(theirs)} tokens) than the target ({len(ours)}): "
            f"{len(differ)} differ{example if differ else ''}; use a draft model of the target's family"
        )
