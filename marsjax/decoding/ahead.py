"""A decode step traced for a mesh that is not here, to compile it ahead of time."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marsjax.decoding import network
from marsjax.decoding.options import Options
from marsjax.decoding.plans import SlotPlan
from marsjax.decoding.step import Controls, Params, start
from marsjax.decoding.strategies import Target, build
from marsjax.models import ModelConfig


def trace_step(
    config: ModelConfig, options: Options, lanes: int, length: int, mesh: Mesh, dtype: Any = jnp.bfloat16
) -> tuple[Any, Any, Any, SlotPlan]:
    """(the traced step, shapes of its parameters, of its state with a cache of `length` positions a lane, its plan)."""
    net, params = network.abstract(config, dtype, mesh)
    strategy, proposer = build(options, Target(net, params, None, mask_id=0))
    state = jax.eval_shape(lambda: start(net, strategy, lanes, length))
    places = net.state_sharding(params, state)
    state = jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p), state, places)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    controls = Controls(
        tau=rows(jnp.float32, lanes), measure=rows(jnp.int32, lanes), temperature=rows(jnp.float32, lanes),
        top_k=rows(jnp.int32, lanes), top_p=rows(jnp.float32, lanes), seed=rows(jnp.uint32, lanes),
        rejection=rows(bool, lanes), limit=rows(jnp.int32, lanes), ends=rows(jnp.int32, lanes, 8),
        halted=rows(bool, lanes), allowed=rows(bool, config.vocab_size), mask_id=rows(jnp.int32),
    )  # fmt: skip
    step: Any = jax.jit(
        lambda p, c, s: strategy.step(net, Params(p, proposer), c, s), donate_argnums=2, out_shardings=places
    )
    return step.trace(params, controls, state), params, state, strategy.plan
