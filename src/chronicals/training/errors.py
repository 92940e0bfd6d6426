"""What can go wrong in training, light to import."""


class TrainingFailure(RuntimeError):
    """Base of the errors below; the message says what to do."""


class TrainingError(TrainingFailure):
    """Training went wrong in a way that going on would hide; the last checkpoint is intact."""


class CheckpointError(TrainingFailure):
    """A checkpoint could not be written or read; what was there before is intact."""


class Interrupted(TrainingFailure):
    """Stopped from outside after a checkpoint was written; the message says how to go on."""
