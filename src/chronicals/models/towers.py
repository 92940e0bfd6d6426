"""Parts of a model beside its text: a vision tower, a projector, whatever reads images or sound."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import cached_file

logger = logging.getLogger(__name__)

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how images and sound become tensors."""

KEPT = "_chronicals_processors"
"""Attribute of a model: their contents by name."""


def beside_text(model: Any) -> list[str]:
    """Paths of the largest modules, and of parameters outside them, that belong to neither decoder, embedding nor head.

    Empty for a model of text alone.
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
        found += _beside(child, text, f"{path}{name}.") if inside else [f"{path}{name}"] * holds_weights
    return found


def is_within(name: str, paths: list[str]) -> bool:
    """Whether ``name`` is one of ``paths`` or lies below one."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def read_processors(model: Any) -> None:
    """Keep, as an attribute of a model that reads more than text, the files that say how, from where it was loaded.

    They are small and read once: the folder may be gone, or the hub out of reach, when the model is saved.
    """
    origin = model.config._name_or_path
    if not origin or hasattr(model, KEPT) or not beside_text(model):
        return
    kept: dict[str, bytes] = {}
    try:
        for name in PROCESSORS:
            found = cached_file(
                origin, name, revision=getattr(model.config, "_commit_hash", None), _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
            )  # fmt: skip
            if found is not None:
                kept[name] = Path(found).read_bytes()
    except OSError as error:
        logger.warning("%s are not saved with the model, for they cannot be read: %s", ", ".join(PROCESSORS), error)
    setattr(model, KEPT, kept)


def save_processors(model: Any, folder: Path) -> None:
    """Write those files beside the weights."""
    read_processors(model)
    for name, content in getattr(model, KEPT, {}).items():
        (folder / name).write_bytes(content)
