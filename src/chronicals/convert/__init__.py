"""Configurations of Axolotl, LLaMA-Factory and TRL, as recipes of ours."""

from chronicals.convert.answers import Answer, AnswerKind
from chronicals.convert.conversion import Conversion, Line, convert
from chronicals.convert.reading import TOOLS, Setting, Theirs, read

__all__ = [
    "TOOLS",
    "Answer",
    "AnswerKind",
    "Conversion",
    "Line",
    "Setting",
    "Theirs",
    "convert",
    "read",
]


def __dir__() -> list[str]:
    return sorted(__all__)
