"""Parts of a model beside its text: a vision tower, a projector, whatever reads images or sound."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import cached_file

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how images and sound become tensors."""


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


def save_processors(model: Any, folder: Path) -> None:
    """Copy what is needed to give a model images from the folder or hub name that it was loaded from."""
    origin = model.config._name_or_path
    for name in PROCESSORS if origin and beside_text(model) else ():
        found = cached_file(
            origin, name, _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if found is not None:
            shutil.copyfile(found, folder / name)
