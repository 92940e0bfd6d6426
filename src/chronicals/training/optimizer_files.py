"""Optimizer states in safetensors files of bounded size, which threads write beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 1 << 29
"""Bytes of tensors in a file; a tensor that is larger has a file of its own."""

WRITERS = 8
"""Files that are copied from the device and written at a time; each holds its tensors in host memory meanwhile."""


def optimizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's optimizer states, in order."""
    return sorted(folder.glob("optimizer*.safetensors"))


def write_optimizer(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``optimizer.safetensors``; what is too large for one file becomes ``optimizer-00001-of-00008.safetensors`` …"""
    parts = _in_parts(tensors)
    names = ["optimizer"] if len(parts) == 1 else [f"optimizer-{n:05d}-of-{len(parts):05d}" for n in range(1, len(parts) + 1)]

    def write(part: list[str], name: str) -> None:
        save_file({key: tensors[key].contiguous().cpu() for key in part}, folder / f"{name}.safetensors")

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, parts, names))


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """All states, in host memory.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    files = optimizer_files(folder)
    if not files:
        raise FileNotFoundError(f"{folder} holds no optimizer states")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _in_parts(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of the tensors of each file; one file where there are none."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if parts[-1] and held + tensor.nbytes > LARGEST:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += tensor.nbytes
    return parts
