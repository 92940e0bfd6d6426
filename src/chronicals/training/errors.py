"""Exceptions of training and of its checkpoints."""

from chronicals.saving.folders import CheckpointError

__all__ = ["CheckpointError", "Interrupted", "TrainingError"]


class TrainingError(RuntimeError):
    """Training cannot go on without hiding a fault; the last checkpoint is intact."""


class RolloutFailed(TrainingError):
    """Answers could not be drawn or rewarded; the steps before are whole, and can be saved."""


class Interrupted(RuntimeError):
    """The run was stopped from outside after a checkpoint was written.

    The message says how to resume.
    """
