"""What training carries from step to step, and how the network is rebuilt from it inside jit."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from marsjax.models import Decoder, ModelConfig, abstract
from marsjax.models.adapters import split
from marsjax.models.layout import from_params, layers_to_list
from marsjax.parallel.sharding import spec

Params = dict[str, Any]  # nested dict of arrays, layers stacked: the tree of nnx.to_pure_dict


class TrainState(NamedTuple):
    """A pytree, donated to each step."""

    params: Params  # float32 master weights of what is trained
    opt_state: Any
    step: jax.Array  # int32 scalar: updates done
    key: jax.Array  # typed PRNG key of what objectives draw


def parted(config: ModelConfig, params: Params) -> tuple[Params, Params]:
    """(what is trained, what is frozen): all and {}, or an adapter and its decoder."""
    if config.adapter is None:
        return params, {}
    frozen, trained = split(params)
    return trained, frozen


def new_state(model: Decoder, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """The state at step 0 of a decoder with stacked layers, whose weights lie on `mesh`. Takes the arrays of what is
    trained: do not use the model afterwards."""
    if model.layout != "stacked":
        raise ValueError("training needs the stacked layout; see marsjax.models.to_stacked")
    params = parted(model.config, nnx.to_pure_dict(nnx.state(model)))[0]
    places = shardings(abstract_state(model.config, optimizer), model.config, mesh)

    def begin(params):
        return optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.key(seed)

    return TrainState(params, *jax.jit(begin, out_shardings=places[1:])(params))


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Shapes and dtypes of a run's state; with a mesh, where each array lies on it."""
    params = parted(config, nnx.to_pure_dict(abstract(config)[1]))[0]
    key = jax.eval_shape(lambda: jax.random.key(0))
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), step, key)
    return state if mesh is None else _laid_out(state, config, mesh)


def abstract_frozen(config: ModelConfig, dtype: Any, mesh: Mesh) -> Params:
    """Shapes of the parameters that are not trained, in `dtype`, and where each lies."""
    return _laid_out(parted(config, nnx.to_pure_dict(abstract(config, param_dtype=dtype)[1]))[1], config, mesh)


def _laid_out(tree: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Shapes as they are, with where each array lies."""
    places = shardings(tree, config, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def shardings(state: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Where each array of a state, or of a tree of parameters, lies: weights by the rules table, moments with their
    weight, the rest everywhere."""
    axes = logical_axes(config)

    def place(path, x):
        names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        found, shape = axes.get(names, ((), ()))
        return NamedSharding(mesh, spec(_axes_of(found, shape, x.shape), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, state)


@lru_cache(maxsize=8)  # asked for each time a state is laid out, and tracing the model takes its time
def logical_axes(config: ModelConfig) -> dict[tuple[Any, ...], tuple[tuple, tuple[int, ...]]]:
    """Of each parameter, by its path: the logical names of its axes, and its shape."""
    flat = abstract(config)[1].flat_state()
    return {tuple(path): (v.get_metadata("axes"), v.get_raw_value().shape) for path, v in flat}


def _axes_of(axes: tuple, shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple:
    """Axes of a moment of shape `wanted`: the weight's own, or, of a factored one, those that are left."""
    if wanted == shape:
        return axes
    for left_out in range(len(shape)):
        if wanted == shape[:left_out] + shape[left_out + 1 :]:
            return axes[:left_out] + axes[left_out + 1 :]
    return (None,) * len(wanted)


def rebuild(config: ModelConfig, params: Params, *, unroll: bool = False) -> Decoder:
    """The decoder of `params`; works under jit. `unroll` gives the list layout, whose layers are not scanned."""
    if unroll:
        params = {**params, "layers": dict(enumerate(layers_to_list(params["layers"], config.num_layers)))}
    return from_params(config, params, "list" if unroll else "stacked")


def copy_as_list(config: ModelConfig, params: Params, dtype: Any) -> Decoder:
    """A decoder of its own, layers as a list, every array a copy in `dtype`, made one at a time."""
    own = {name: jax.tree.map(lambda x: jnp.array(x, dtype), tree) for name, tree in params.items() if name != "layers"}
    own["layers"] = {
        i: jax.tree.map(lambda x, i=i: jnp.array(x[i], dtype), params["layers"]) for i in range(config.num_layers)
    }
    return from_params(config, own, "list", dtype)
