"""Parts of a model outside its text model: vision and audio towers, projectors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import cached_file

logger = logging.getLogger(__name__)

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Configuration files of the processors that turn images and sound into tensors."""

_KEPT = "_chronicals_processors"
"""Attribute of a model: the contents of these files by name."""


def beside_text(model: Any) -> list[str]:
    """Return the outermost modules and parameters outside decoder, embedding and head, by path.

    Empty for a text-only model.
    """
    if model.config.get_text_config() is model.config:
        return []
    ends = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {module for end in ends if end is not None for module in end.modules()}
    return list(_beside(model, text, ""))


def _beside(module: nn.Module, text: set[nn.Module], path: str) -> list[str]:
    found = [f"{path}{name}" for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        if child in text:
            continue
        inside = any(part in text for part in child.modules())
        holds_weights = next(child.parameters(), None) is not None
        found += (
            _beside(child, text, f"{path}{name}.") if inside else [f"{path}{name}"] * holds_weights
        )
    return found


def is_within(name: str, paths: list[str]) -> bool:
    """Return True if ``name`` is one of ``paths`` or below one."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def read_processors(model: Any) -> None:
    """Read the processor files from where a model was loaded, and keep them as an attribute.

    They are read at once, since the folder may be gone or the hub unreachable when the model is
    saved. Does nothing for text-only models.
    """
    origin = model.config._name_or_path
    if not origin or hasattr(model, _KEPT) or not beside_text(model):
        return
    kept: dict[str, bytes] = {}
    try:
        for name in PROCESSORS:
            found = cached_file(
                origin,
                name,
                revision=getattr(model.config, "_commit_hash", None),
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if found is not None:
                kept[name] = Path(found).read_bytes()
    except OSError as error:
        logger.warning(
            "%s cannot be read and will not be saved with the model: %s",
            ", ".join(PROCESSORS),
            error,
        )
    setattr(model, _KEPT, kept)


def save_processors(model: Any, folder: Path) -> None:
    """Write the processor files to the folder of the weights."""
    read_processors(model)
    for name, content in getattr(model, _KEPT, {}).items():
        (folder / name).write_bytes(content)
