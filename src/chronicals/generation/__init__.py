"""Generate answers with a trained model."""

from chronicals.generation.answer import Chat, Trained, generate, generate_answer, load_trained

__all__ = ["Chat", "Trained", "generate", "generate_answer", "load_trained"]


def __dir__() -> list[str]:
    return sorted(__all__)
