"""Rows of weights read from a model's safetensors files, for processes each of which holds some of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

STORED = "_chronicals_stored_rows"
"""Attribute of a model on the meta device: where its weights are."""

PART = "_chronicals_part"
"""Attribute of parameters that are one rank's part of a frozen weight: among how many ranks it is divided."""


class StoredRows:
    """The weights of a folder or hub name, by the names of the model.

    Args:
        folder: with ``config.json`` and safetensors files.
        model: of that folder, on the meta device.

    Raises:
        ValueError: a weight of the model is not in the files under its name, or is of another shape there.
    """

    def __init__(self, folder: Path, model: Any):
        self.folder = folder
        self.files = _files_by_name(folder)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        missing = sorted(shapes.keys() - self.files.keys())
        if missing:
            raise ValueError(
                f"sharding='weights': {len(missing)} weights are not in the files of {folder} under their names, the first is "
                f"{missing[0]}; they cannot be read by rows, take sharding='optimizer'"
            )
        for name, shape in shapes.items():
            with safe_open(self.files[name], "pt") as file:
                there = tuple(file.get_slice(name).get_shape())
            if there != shape:
                raise ValueError(f"{name} ({list(there)} there, {list(shape)} here): of another shape than config.json says")

    def read(self, name: str, weight: Tensor, rows: range) -> Tensor:
        """Of the weight's shape, in the dtype of its file; rows but those asked for are left as they are found."""
        with safe_open(self.files[name], "pt") as file:
            stored = file.get_slice(name)[rows.start : rows.stop]
        found = torch.empty(weight.shape, dtype=stored.dtype)
        found[rows.start : rows.stop] = stored
        return found


def _files_by_name(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weights.items()}
    found = dict[str, Path]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within: parameters of modules that are made are on the meta device, where they take no memory; buffers are what they
    are."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
