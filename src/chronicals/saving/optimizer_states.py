"""Optimizer states in safetensors files of bounded size, so that files can be synced and hashed
beside each other.

Of several ranks each writes the pieces that it has: tensors of one dimension, with where each
begins in the header, in the form that torch's distributed checkpoints read (``DCP_SHARDING_INFO``),
and the shape of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LARGEST = 1 << 29
"""Bytes of tensors in a file; a tensor that is larger has a file of its own."""

STAGED = 1 << 26
"""Bytes that are copied from the device at a time, into pinned memory: several times as fast as
into memory that is not.
"""


def optimizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's optimizer states, in order."""
    return sorted(folder.glob("optimizer*.safetensors"))


PIECES = "DCP_SHARDING_INFO"
SHAPES = "shapes"
"""In a header: where pieces begin (torch.distributed.checkpoint, hf_storage.py), and of what
shape the whole is.
"""


@dataclass(frozen=True)
class Piece:
    """Part of a state.

    Attributes:
        tensor: ``[n]``.
        begin: the first of its elements among those of the whole.
        shape: of the whole.
    """

    tensor: Tensor
    begin: int
    shape: torch.Size


def write_pieces(pieces: Mapping[str, Piece], folder: Path, rank: int, count: int) -> None:
    """Write ``optimizer-rank-00002-of-00004.safetensors`` of the second of four ranks, perhaps
    in several files.
    """
    stem = f"optimizer-rank-{rank + 1:05d}-of-{count:05d}"
    given = {name: piece for name, piece in pieces.items() if piece.tensor.numel()}

    def header(names: list[str]) -> dict[str, str]:
        begins = {name: {"saved_offsets": [given[name].begin]} for name in names}
        return {
            PIECES: json.dumps(begins),
            SHAPES: json.dumps({name: list(given[name].shape) for name in names}),
        }

    _write({name: piece.tensor for name, piece in given.items()}, folder, stem, header)


def write_optimizer(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``optimizer.safetensors``; what is too large for one file becomes
    ``optimizer-00001-of-00008.safetensors`` …
    """
    _write(tensors, folder, "optimizer", lambda names: None)


def _write(
    tensors: Mapping[str, Tensor],
    folder: Path,
    stem: str,
    header: Callable[[list[str]], dict[str, str] | None],
) -> None:
    """In files called after ``stem``, each with the header that ``header`` gives for the tensors
    in it.
    """
    parts = _in_parts(tensors)
    names = (
        [stem]
        if len(parts) == 1
        else [f"{stem}-{n:05d}-of-{len(parts):05d}" for n in range(1, len(parts) + 1)]
    )
    on_card = any(tensor.is_cuda for tensor in tensors.values())
    stage = torch.empty(STAGED, dtype=torch.uint8, pin_memory=True) if on_card else None
    for part, name in zip(parts, names, strict=True):
        found = {
            key: _in_host_memory(tensors[key], stage if tensors[key].is_cuda else None)
            for key in part
        }
        save_file(found, folder / f"{name}.safetensors", header(part))


def _in_host_memory(tensor: Tensor, stage: Tensor | None) -> Tensor:
    """A dense copy, by way of ``stage`` (bytes in pinned memory) where there is one."""
    if stage is None:
        return tensor.contiguous().cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    pieces = zip(
        _bytes(tensor.contiguous()).split(len(stage)), _bytes(host).split(len(stage)), strict=True
    )
    for there, here in pieces:
        here.copy_(stage[: here.numel()].copy_(there))
    return host


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class StoredStates:
    """The states of a folder, read one by one.

    Raises:
        FileNotFoundError: the folder holds none.
    """

    def __init__(self, folder: Path):
        files = optimizer_files(folder)
        if not files:
            raise FileNotFoundError(f"{folder} holds no optimizer states")
        self._places: dict[str, list[tuple[Path, int | None, list[int]]]] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                header = opened.metadata() or {}
                begins, shapes = (json.loads(header.get(key, "{}")) for key in (PIECES, SHAPES))
                for name in opened.keys():  # noqa: SIM118  no mapping
                    begin = begins[name]["saved_offsets"][0] if name in begins else None
                    self._places.setdefault(name, []).append((file, begin, shapes.get(name, [])))

    def names(self) -> list[str]:
        return list(self._places)

    def of(self, weight: str) -> dict[str, Tensor]:
        """The states of a weight, by their own names."""
        prefix = f"{weight}:"
        return {
            name[len(prefix) :]: self.read(name) for name in self._places if name.startswith(prefix)
        }

    def read(self, name: str) -> Tensor:
        """A state, whole, in host memory.

        Raises:
            ValueError: a piece of it is missing.
        """
        whole = None
        held = 0
        for file, begin, shape in self._places[name]:
            with safe_open(file, "pt") as opened:
                tensor = opened.get_tensor(name)
            if begin is None:
                return tensor
            if whole is None:
                whole = torch.empty(shape, dtype=tensor.dtype)
            whole.view(-1)[begin : begin + len(tensor)] = tensor
            held += len(tensor)
        assert whole is not None
        if held != whole.numel():
            raise ValueError(
                f"optimizer state {name!r}: {held} of {whole.numel()} elements are there"
            )
        return whole


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """All states, whole, in host memory.

    Raises:
        FileNotFoundError: the folder holds none.
        ValueError: a piece of a state is missing.
    """
    stored = StoredStates(folder)
    return {name: stored.read(name) for name in stored.names()}


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
