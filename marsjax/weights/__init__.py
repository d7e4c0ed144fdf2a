"""Checkpoints in (Hugging Face directories, hub ids, GGUF files) and out (Hugging Face directories)."""

from marsjax.weights.adapters import save_adapter
from marsjax.weights.conversion import convert
from marsjax.weights.loading import load
from marsjax.weights.pretrained import GenerationDefaults, Pretrained
from marsjax.weights.saving import save
from marsjax.weights.tensors import CheckpointError

__all__ = ["CheckpointError", "GenerationDefaults", "Pretrained", "convert", "load", "save", "save_adapter"]
