"""marsjax: make a language model you already have generate several tokens per forward pass."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from marsjax.decoding.generator import Generator


def load(source: str, **options: Any) -> "Generator":
    """A ready generator from a Hugging Face directory, a hub id or a GGUF file.

    See `marsjax.decoding.generator.Generator.load` for the options.
    """
    from marsjax.decoding.generator import Generator

    return Generator.load(source, **options)
