"""Errors of the expert-offload engine."""


class ExpertRecordError(RuntimeError):
    """An expert's record cannot be read, or is not what was loaded."""


def record_error(path: str, expert: int, reason: str) -> ExpertRecordError:
    """Return the error about an expert of the module at ``path``."""
    return ExpertRecordError(f"{path}, expert {expert}: {reason}; load the model again")


class NotExpertByExpert(ValueError):
    """The files of a model hold its experts under names by which none can be read by itself."""
