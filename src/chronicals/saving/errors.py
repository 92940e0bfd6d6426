"""The error of saving and loading, in a module that is light to import."""


class CheckpointError(RuntimeError):
    """A checkpoint or a model could not be written or read; what was there before is intact."""
