"""The tuner: settings of a run tried on its own data, each in a run of its own."""

from chronicals.tuning.tuner import Event, StudyFailed, Tuner

__all__ = ["Event", "StudyFailed", "Tuner"]


def __dir__() -> list[str]:
    return sorted(__all__)
