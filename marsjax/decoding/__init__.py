"""Generation: plans of slots, one jitted step, and `Generator` on top."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marsjax.decoding.generator import Generator
    from marsjax.decoding.result import Chunk, Result

__all__ = ["Chunk", "Generator", "Result"]

_HOMES = {"Chunk": "result", "Generator": "generator", "Result": "result"}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the command line wants `options` only, and without jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
