"""Read a GGUF file: its settings, and its tensors as stored or dequantised, by package gguf."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GGUF_SUFFIX = ".gguf"
_MODEL_FILES = ("config.json", "adapter_config.json")
"""A folder with one of these holds a model of transformers, whatever GGUF files it has as well."""

PROJECTOR_MARK = "mmproj"
"""Part of the file names of image projectors, which are in the same folders as language models."""


def require_gguf() -> None:
    """Raise ValueError if the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "GGUF files are written and read by the package gguf, which is not installed: pip "
            "install 'chronicals[export]'"
        )
    logging.getLogger("gguf").setLevel(logging.WARNING)


def gguf_of(name: str | Path) -> Path | None:
    """Return the GGUF file that a model's name stands for; None if it stands for another model.

    The name is the path of the file, or of a folder with one such file and no other model.

    Raises:
        ValueError: the folder holds several.
    """
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path if path.suffix == GGUF_SUFFIX else None
    if not path.is_dir() or any((path / other).exists() for other in _MODEL_FILES):
        return None
    files = sorted(file for file in path.glob(f"*{GGUF_SUFFIX}") if PROJECTOR_MARK not in file.name)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"model={str(name)!r}: the folder holds {len(files)} GGUF files ({names}); give the "
            "path of one"
        )
    return files[0] if files else None


class GGUFFile:
    """A GGUF file, mapped into memory.

    Attributes:
        tensors: of ``gguf.GGUFReader``, by name.

    Raises:
        ValueError: the package gguf is missing, or the file is no GGUF file.
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
        """Return a setting by its whole key, None if there is none."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def type_of(self, name: str) -> str:
        """Return the name of a tensor's ggml type, as ``Q8_0``."""
        return str(self.tensors[name].tensor_type.name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in torch's order, which the file has reversed."""
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def blocks(self, name: str) -> Tensor:
        """Return a copy of a quantised matrix's bytes, uint8 ``[rows, bytes of a row]``."""
        data = np.array(self.tensors[name].data, np.uint8)
        return torch.from_numpy(data).view(self.shape_of(name)[0], -1)

    def read(self, name: str) -> Tensor:
        """Return a tensor, dequantised to fp32."""
        import gguf

        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, np.float32)).view(self.shape_of(name))

    def refused(self, reason: str) -> NotExpressible:
        """Return the error for a file that no class of transformers computes as llama.cpp does."""
        return NotExpressible(
            f"{self.path}: {reason}: such a file cannot be trained on here; take the model's own "
            "safetensors"
        )


class ArchitectureSettings:
    """Settings of a file's architecture, by their keys behind its name.

    Attributes:
        architecture: llama.cpp's name.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture = str(file.value("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; numbers are rounded to the seven digits that fp32 has.

        Raises:
            NotExpressible: it differs between layers.
        """
        value = self.file.value(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise self.file.refused(
                    f"{self.architecture}.{key} differs between layers ({value})"
                )
            value = value[0] if value else None
        if isinstance(value, float):
            value = float(f"{value:.7g}")
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return a value; raises ValueError if it is missing."""
        value = self.get(key)
        if value is None:
            raise ValueError(
                f"{self.file.path}: says no {self.architecture}.{key}; the file is damaged, "
                "download it again"
            )
        return value


class NotExpressible(ValueError):
    """GGUF, or llama.cpp, has no form for a part of the model, which the message names."""
