"""Reads rows of weights from a model's safetensors files.

It serves processes each of which holds a part of the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

STORED_ROWS = "_chronicals_stored_rows"
"""Attribute of a model on the meta device: the ``StoredRows`` with its weights."""

SHARING_RANKS = "_chronicals_part"
"""Attribute of a rank's part of a frozen weight: the number of ranks that share the weight."""


class NotByRows(ValueError):
    """The files store weights in another form than the model, so none can be read by itself."""


class StoredRows:
    """The stored weights of a model, by the names of its parameters.

    Args:
        folder: a folder with ``config.json`` and safetensors files.
        model: the model of that folder, on the meta device.

    Raises:
        NotByRows: a weight of the model is not in the files under its name.
        ValueError: a weight has another shape in the files.
    """

    def __init__(self, folder: Path, model: Any):
        self.folder = folder
        self.files = files_by_name(folder)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        missing = sorted(shapes.keys() - self.files.keys())
        if missing:
            raise NotByRows(
                f"sharding='weights': {len(missing)} weights are not in the files of {folder} "
                "under their names, the first is "
                f"{missing[0]}; they cannot be read by rows, take sharding='optimizer'"
            )
        for name, shape in shapes.items():
            with safe_open(self.files[name], "pt") as file:
                there = tuple(file.get_slice(name).get_shape())
            if there != shape:
                raise ValueError(
                    f"{name} ({list(there)} there, {list(shape)} here): of another shape than "
                    "config.json says"
                )

    def read(self, name: str, weight: Tensor, rows: range) -> Tensor:
        """Return a tensor of the weight's shape and the file's dtype with ``rows`` filled.

        Other rows are uninitialised.
        """
        with safe_open(self.files[name], "pt") as file:
            stored = file.get_slice(name)[rows.start : rows.stop]
        found = torch.empty(weight.shape, dtype=stored.dtype)
        found[rows.start : rows.stop] = stored
        return found


class StoredWeights(Mapping[str, Tensor]):
    """A mapping from names to whole weights, each read when it is accessed."""

    def __init__(self, stored: StoredRows):
        self.files = stored.files

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def files_by_name(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor in a folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weights.items()}
    found = dict[str, Path]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


SAMPLES = 64
SAMPLE_BYTES = 4096
"""Number of pieces that a file of weights is sampled in for its digest, and bytes of each."""


def digest_of_files(name: str | Path) -> str:
    """Return a digest that identifies the safetensors files of a folder or of a cached hub name.

    It covers the names, sizes and headers of the files and evenly spaced pieces of their contents.
    A weight that differs only between these pieces is not noticed.
    """
    from huggingface_hub import snapshot_download

    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(name), local_files_only=True))
    digest = hashlib.sha256()
    for path in sorted(set(files_by_name(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header))
            # A safetensors file: 8 bytes of header length, the header, the tensors.
            for number in range(SAMPLES):
                file.seek(
                    8 + header + number * max(size - 8 - header - SAMPLE_BYTES, 0) // (SAMPLES - 1)
                )
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which new parameters are on the meta device; buffers are allocated as usual."""
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
