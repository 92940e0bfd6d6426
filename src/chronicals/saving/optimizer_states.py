"""Optimizer states in safetensors files of bounded size, so that files can be synced and hashed beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 1 << 29
"""Bytes of tensors in a file; a tensor that is larger has a file of its own."""

STAGED = 1 << 26
"""Bytes that are copied from the device at a time, into pinned memory: several times as fast as into memory that is not."""


def optimizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's optimizer states, in order."""
    return sorted(folder.glob("optimizer*.safetensors"))


def write_optimizer(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``optimizer.safetensors``; what is too large for one file becomes ``optimizer-00001-of-00008.safetensors`` …"""
    parts = _in_parts(tensors)
    names = ["optimizer"] if len(parts) == 1 else [f"optimizer-{n:05d}-of-{len(parts):05d}" for n in range(1, len(parts) + 1)]
    on_card = any(tensor.is_cuda for tensor in tensors.values())
    stage = torch.empty(STAGED, dtype=torch.uint8, pin_memory=True) if on_card else None
    for part, name in zip(parts, names, strict=True):
        found = {key: _in_host_memory(tensors[key], stage if tensors[key].is_cuda else None) for key in part}
        save_file(found, folder / f"{name}.safetensors")


def _in_host_memory(tensor: Tensor, stage: Tensor | None) -> Tensor:
    """A dense copy, by way of ``stage`` (bytes in pinned memory) where there is one."""
    if stage is None:
        return tensor.contiguous().cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    pieces = zip(_bytes(tensor.contiguous()).split(len(stage)), _bytes(host).split(len(stage)), strict=True)
    for there, here in pieces:
        here.copy_(stage[: here.numel()].copy_(there))
    return host


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


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
