"""Adapters as trees of parameters: which are theirs, apart from the decoder's and together with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from marsjax.models.config import AdapterConfig
from marsjax.models.decoder import Decoder
from marsjax.models.layout import abstract, from_params
from marsjax.parallel.sharding import shardings

Tree = dict[Any, Any]  # nested dict of arrays


def is_adapter(path: tuple[Any, ...]) -> bool:
    """Whether a parameter's path is that of an adapter's."""
    return "adapter" in path or path[0] in ("masks", "sampler")


def split(params: Tree) -> tuple[Tree, Tree]:
    """(the decoder's own, the adapter's) parameters; either may be {}."""
    return _those(params, (), lambda path: not is_adapter(path)), _those(params, (), is_adapter)


def join(first: Tree, second: Tree) -> Tree:
    """Two trees without a common leaf as one."""
    joined = dict(first)
    for key, value in second.items():
        joined[key] = join(first[key], value) if key in first else value
    return joined


def _those(tree: Tree, path: tuple[Any, ...], wanted: Any) -> Tree:
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            if below := _those(value, (*path, key), wanted):
                found[key] = below
        elif wanted((*path, key)):
            found[key] = value
    return found


def attach(model: Decoder, adapter: AdapterConfig, *, seed: int = 0, mesh: Any = None) -> Decoder:
    """The same decoder, sharing its arrays, with a new adapter in float32, which changes nothing yet.

    B is 0. Mask embeddings are drawn around the mean of the decoder's own, as scattered as those are.
    `mesh`: where it is to lie; None: on the first device.
    """
    if model.config.adapter is not None:
        raise ValueError("the decoder has an adapter already")
    config = dataclasses.replace(model.config, adapter=adapter)
    own = nnx.to_pure_dict(nnx.state(model))
    unit = dataclasses.replace(config, initializer_range=1.0)

    def make(table: jax.Array) -> Tree:
        made = split(nnx.to_pure_dict(nnx.state(Decoder(unit, rngs=nnx.Rngs(seed), layout=model.layout))))[1]
        if "masks" in made:
            table = table.astype(jnp.float32)
            made["masks"]["embedding"] = table.mean(0) + made["masks"]["embedding"] * table.std(0)
        return made

    places = None
    if mesh is not None:
        places = split(nnx.to_pure_dict(shardings(abstract(config, model.layout)[1], mesh)))[1]
    made = jax.jit(make, out_shardings=places)(own["embed_table"]["embedding"])
    return from_params(config, join(own, made), model.layout)


def merge(model: Decoder, mask_id: int | None = None) -> Decoder:
    """The decoder that computes the same without an adapter: W + (alpha / r) A B; the one embedding of all masks, if
    there is one, becomes the row of the mask token.

    Raises ValueError, with the reason, where there is none.
    """
    adapter = model.config.adapter
    if adapter is None:
        return model
    if reason := cannot_merge(adapter):
        raise ValueError(f"this adapter cannot be merged into the model's weights: {reason}")
    params = nnx.to_pure_dict(nnx.state(model))

    def merged(tree: Tree) -> Tree:
        if "adapter" not in tree:
            return {key: merged(value) if isinstance(value, dict) else value for key, value in tree.items()}
        lora, kernel = tree["adapter"], tree["kernel"]
        more = jnp.matmul(lora["a"], lora["b"], precision="highest") * (adapter.alpha / adapter.rank)
        rest = {key: value for key, value in tree.items() if key != "adapter"}
        return rest | {"kernel": (kernel.astype(jnp.float32) + more).astype(kernel.dtype)}

    own = merged(params)
    if adapter.masks:
        if mask_id is None:
            raise ValueError("the adapter has an embedding for masks, and the model no mask token to give it to")
        table = own["embed_table"]["embedding"]
        row = own.pop("masks")["embedding"][0].astype(table.dtype)
        own["embed_table"] = {"embedding": table.at[mask_id].set(row)}
    return from_params(dataclasses.replace(model.config, adapter=None), own, model.layout)


def cannot_merge(adapter: AdapterConfig) -> str:
    """Why an adapter cannot be merged; "" if it can."""
    if adapter.gated:
        return (
            "it is gated, and acts on masks only; merged weights would act on every token and change the model's own "
            "answers. Keep it as a file beside the model: marsjax generate --model BASE --adapter DIR"
        )
    if adapter.masks > 1 or adapter.sampler:
        return (
            "it has several embeddings of masks or a sampler head, which the model has no place for. Keep it as a file "
            "beside the model: marsjax generate --model BASE --adapter DIR"
        )
    return ""
