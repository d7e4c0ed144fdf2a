"""Where every parameter and optimiser moment of Qwen2.5-0.5B and 7B lies on the supported slices: shardings.txt.

    python tests/golden/shardings.py        writes it anew; read the difference before it is committed

One line an array: name, dtype, shape, and the mesh axes of each dimension (- is none), for A-meshes, B-meshes, ...:
meshes on which a model's arrays all lie alike share a letter. Then the bytes a chip holds on each mesh.
"""

import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, AxisType

from marsjax.models import ModelConfig
from marsjax.parallel.slices import parse_slice
from marsjax.training.config import OptimizerSection
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import abstract_state

FILE = Path(__file__).with_name("shardings.txt")
MODELS = {
    "Qwen2.5-0.5B": ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, tie_embeddings=True),
    "Qwen2.5-7B": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, tie_embeddings=False),
}
SLICES = ("v4-32", "v4-64", "v5e-16", "v5e-64", "v5p-32", "v5p-128", "v6e-16")
MOMENTS = ("float32", "bfloat16", "factored")


def meshes() -> dict[str, AbstractMesh]:
    """Of each slice: all of its chips for fsdp; half of them, with tensor=2; and two such slices."""
    found = {}
    for name in SLICES:
        chips = parse_slice(name).chips
        for sizes in ({"fsdp": chips}, {"fsdp": chips // 2, "tensor": 2}, {"slice": 2, "fsdp": chips}):
            label = f"{name} " + ",".join(f"{axis}={size}" for axis, size in sizes.items())
            found[label] = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    return found


@cache  # slices of different generations have equal meshes
def arrays(model: ModelConfig, moments: str, mesh: AbstractMesh) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """{"parameters" or "moments ...": {path: shape with sharding}} of a run's state."""
    section = OptimizerSection(moments=moments)
    state = abstract_state(model, make_optimizer(section, make_schedule(section, 10)), mesh)

    def named(tree):
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {".".join(str(getattr(k, "key", getattr(k, "name", ""))) for k in p).strip("."): x for p, x in flat}

    return {"parameters": named(state.params), f"moments {moments}": named(state.opt_state)}


def where(x: jax.ShapeDtypeStruct) -> str:
    entries = [*x.sharding.spec, *(None,) * (x.ndim - len(x.sharding.spec))]
    return ",".join("+".join(e) if isinstance(e, tuple) else e or "-" for e in entries) or "."


def lines() -> Iterator[str]:
    for name, model in MODELS.items():
        yield name
        found: dict[str, dict[str, dict]] = {}  # of a mesh, and a kind: {path: array}
        for label, mesh in meshes().items():
            found[label] = {}
            for moments in MOMENTS:
                found[label] |= arrays(model, moments, mesh)
        alike: dict[str, list[str]] = {}
        for label, kinds in found.items():
            alike.setdefault(str([[where(x) for x in kind.values()] for kind in kinds.values()]), []).append(label)
        groups = dict(zip(string.ascii_uppercase, alike.values(), strict=False))
        for letter, labels in groups.items():
            yield from (f"  {letter} {label}" for label in labels)
        for kind, paths in next(iter(found.values())).items():
            yield f" {kind}"
            for path, x in paths.items():
                places: dict[str, str] = {}
                for letter, (label, *_) in groups.items():
                    place = where(found[label][kind][path])
                    places[place] = places.get(place, "") + letter
                shape = "x".join(map(str, x.shape)) or "scalar"
                yield f"  {path} {x.dtype} {shape} " + " ".join(f"{on}:{place}" for place, on in places.items())
        yield " bytes of a chip"
        for label, kinds in found.items():
            yield f"  {label} " + " ".join(f"{kind.replace(' ', '-')}={held(x)}" for kind, x in kinds.items())


def held(paths: dict[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of one chip."""
    total = 0
    for x in paths.values():
        part = x.dtype.itemsize
        for size in x.sharding.shard_shape(x.shape):
            part *= size
        total += part
    return total


def text() -> str:
    return "".join(line + "\n" for line in lines())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
