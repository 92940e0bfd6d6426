"""The second GGUF file of a model of images and text, with the part that reads images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chronicals.export.source import Source
from chronicals.formats.gguf.reader import require_gguf
from chronicals.formats.gguf.vision import (
    processor_of,
    vision_family_of,
    vision_pieces,
    vision_settings,
    vision_tensors,
    vision_type_of,
    write_projector,
)
from chronicals.formats.gguf.writer import bytes_of
from chronicals.formats.weight_files import StoredTensor


def settings_of(source: Source) -> dict[str, Any]:
    """Return all settings of the file, by their keys."""
    vision_family_of(source.config)
    return vision_settings(source.config, processor_of(source.folder))


def tensors_of(source: Source) -> dict[str, StoredTensor]:
    """Return the tensors that images go through, by the names of their modules below ``model``."""
    return vision_tensors(source.config, source.beside_language)


def write(source: Source, target: Path, kind: str) -> None:
    """Write the file.

    Raises:
        NotExpressible: it has no form for the model.
        ValueError: the package gguf is missing.
    """
    require_gguf()
    settings = settings_of(source)
    tensors = tensors_of(source)
    write_projector(target, settings, vision_pieces(tensors), tensors, kind)


def size(source: Source, kind: str) -> int:
    """Return the bytes of the file's tensors."""
    require_gguf()
    pieces = vision_pieces(tensors_of(source))
    return sum(bytes_of(piece, vision_type_of(piece, kind)) for piece in pieces)
