"""Answers from a trained model."""

from chronicals.generation.answer import answer, generate, load_trained

__all__ = ["answer", "generate", "load_trained"]
