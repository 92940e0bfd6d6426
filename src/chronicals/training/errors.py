"""What can go wrong in training, light to import."""

from chronicals.saving.errors import CheckpointError

__all__ = ["CheckpointError", "Interrupted", "TrainingError"]


class TrainingError(RuntimeError):
    """Training went wrong in a way that going on would hide; the last checkpoint is intact."""


class Interrupted(RuntimeError):
    """Stopped from outside after a checkpoint was written; the message says how to go on."""
