"""What can go wrong when something is saved, light to import."""


class CheckpointError(RuntimeError):
    """A checkpoint or a model could not be written or read; what was there before is intact."""
