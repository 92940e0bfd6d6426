"""Reading a GGUF file: its settings, and its tensors as they are stored or dequantised. By the
package ``gguf``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.models.gguf_tensors import Piece, Restored

SUFFIX = ".gguf"
HOLDS_OTHERS = ("config.json", "adapter_config.json")
"""A folder with one of these is no folder of a GGUF file, whatever lies beside them."""

PROJECTOR = "mmproj"
"""In the names of files of what reads images, which lie beside those of language models."""


def require_gguf() -> None:
    """Raises ValueError where the package is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "GGUF files are written and read by the package gguf, which is not installed: pip "
            "install 'chronicals[export]'"
        )
    logging.getLogger("gguf").setLevel(logging.WARNING)


def gguf_of(name: str | Path) -> Path | None:
    """The GGUF file that a model's name stands for: itself, or the only one in a folder that holds
    no other model.

    Raises:
        ValueError: the folder holds several.
    """
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or any((path / other).exists() for other in HOLDS_OTHERS):
        return None
    found = sorted(file for file in path.glob(f"*{SUFFIX}") if PROJECTOR not in file.name)
    if len(found) > 1:
        named = ", ".join(file.name for file in found)
        raise ValueError(
            f"model={str(name)!r}: the folder holds {len(found)} GGUF files ({named}); give the "
            "path of one"
        )
    return found[0] if found else None


def fingerprint(path: Path) -> dict[str, str]:
    """Name and SHA-256 of a file, by which an adapter says over which bits it was trained."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


class File:
    """A GGUF file, mapped into memory.

    Raises:
        ValueError: the package gguf is missing, or it is no such file.
    """

    def __init__(self, path: Path):
        require_gguf()
        import gguf

        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(
                f"{path}: is no GGUF file, or one that is cut ({error}); download it again"
            ) from error
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def value(self, key: str) -> Any:
        """A setting by its whole key; None where there is none."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def settings(self) -> list[str]:
        """The keys of all."""
        return [key for key in self.reader.fields if not key.startswith("GGUF.")]

    def type_of(self, name: str) -> str:
        return str(self.tensors[name].tensor_type.name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """As of torch; the file has it reversed."""
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def blocks(self, name: str) -> Tensor:
        """The bytes of a quantised tensor of two dimensions, copied, uint8 ``[rows, bytes of a
        row]``.
        """
        data = np.array(self.tensors[name].data, np.uint8)
        return torch.from_numpy(data).view(self.shape_of(name)[0], -1)

    def read(self, name: str) -> Tensor:
        """A tensor dequantised, fp32."""
        import gguf

        found = self.tensors[name]
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        return torch.from_numpy(np.array(values, np.float32)).view(self.shape_of(name))

    def restored(self, pieces: list[Piece], shapes: Mapping[str, tuple[int, ...]]) -> Restored:
        """The model's tensors, fp32, by their names in it."""
        return Restored(pieces, shapes, self.read)
