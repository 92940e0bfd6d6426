"""Generate answers with a trained model."""

from chronicals.generation.answer import Trained, answer, generate, load_trained
from chronicals.generation.chat import Chat

__all__ = ["Chat", "Trained", "answer", "generate", "load_trained"]


def __dir__() -> list[str]:
    return sorted(__all__)
