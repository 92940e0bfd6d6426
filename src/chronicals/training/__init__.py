"""The loop, its step, checkpoints, callbacks and the report."""

from chronicals.config import ChronicalsConfig
from chronicals.memory import enable_gradient_checkpointing
from chronicals.training.errors import CheckpointError, Interrupted, TrainingError
from chronicals.training.run.callbacks import Callback
from chronicals.training.run.evaluation import Evaluation, evaluate
from chronicals.training.run.run_state import TrainingResult
from chronicals.training.step.graphs import enable_cuda_graphs
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
