"""The loop, its step, checkpoints, callbacks and the report."""

from chronicals.config import ChronicalsConfig
from chronicals.memory import enable_gradient_checkpointing
from chronicals.training.callbacks import Callback
from chronicals.training.errors import CheckpointError, Interrupted, TrainingError
from chronicals.training.evaluation import Evaluation, evaluate
from chronicals.training.graphs import enable_cuda_graphs
from chronicals.training.run import TrainingResult
from chronicals.training.trainer import ChronicalsTrainer

__all__ = [
    "Callback",
    "CheckpointError",
    "ChronicalsConfig",
    "ChronicalsTrainer",
    "Evaluation",
    "Interrupted",
    "TrainingError",
    "TrainingResult",
    "enable_cuda_graphs",
    "enable_gradient_checkpointing",
    "evaluate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
