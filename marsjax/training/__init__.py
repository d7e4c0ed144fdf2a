"""Fine-tuning: objectives, optimiser, the loop, checkpoints, held-out evaluation."""

from marsjax.training.config import AnotherRun, ConfigError, TrainConfig
from marsjax.training.config_text import describe, load_config
from marsjax.training.loop import TrainingDiverged, TrainResult, train

__all__ = [
    "AnotherRun",
    "ConfigError",
    "TrainConfig",
    "TrainResult",
    "TrainingDiverged",
    "describe",
    "load_config",
    "train",
]
