"""Formats of files that hold models: names, layouts, readers and writers, and no model."""

from chronicals.formats import gguf

__all__ = ["gguf"]


def __dir__() -> list[str]:
    return sorted(__all__)
