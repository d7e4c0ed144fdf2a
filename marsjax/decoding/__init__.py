"""Generation: plans of slots, one jitted step, and `Generator` on top."""

from marsjax.decoding.generator import Generator
from marsjax.decoding.result import Chunk, Result

__all__ = ["Chunk", "Generator", "Result"]
