"""Optimizer states in safetensors files of bounded size, so that files are synced in parallel.

With several ranks, each writes the pieces that it has as tensors of one dimension. The header has
the beginning of each, in the form of torch's distributed checkpoints (``DCP_SHARDING_INFO``), and
the shape of the whole state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MAX_FILE_BYTES = 1 << 29
"""Bytes of tensors in a file; a larger tensor has a file of its own."""

STAGE_BYTES = 1 << 26
"""Bytes that are copied from the device at a time, into pinned memory, which is several times as
fast as into other memory.
"""


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's optimizer states, in order."""
    return sorted(folder.glob("optimizer*.safetensors"))


OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Key in a header of the beginnings of pieces (torch.distributed.checkpoint, hf_storage.py)."""

SHAPES_KEY = "shapes"
"""Key in a header of the shapes of whole states."""


@dataclass(frozen=True)
class Piece:
    """A part of an optimizer state.

    Attributes:
        tensor: its elements, ``[n]``.
        begin: index of the first among the elements of the whole state.
        shape: of the whole state.
    """

    tensor: Tensor
    begin: int
    shape: torch.Size


def write_pieces(pieces: Mapping[str, Piece], folder: Path, rank: int, count: int) -> None:
    """Write a rank's pieces.

    Those of the second of four ranks go to ``optimizer-rank-00002-of-00004.safetensors``. There are
    several files if they are large. Empty pieces are left out.
    """
    stem = f"optimizer-rank-{rank + 1:05d}-of-{count:05d}"
    tensors = {name: piece.tensor for name, piece in pieces.items() if piece.tensor.numel()}
    write_optimizer(tensors, folder, stem, pieces)


def write_optimizer(
    tensors: Mapping[str, Tensor],
    folder: Path,
    stem: str = "optimizer",
    pieces: Mapping[str, Piece] | None = None,
) -> None:
    """Write ``optimizer.safetensors``, or ``optimizer-00001-of-00008.safetensors`` … if large.

    Args:
        tensors: on any device, by name.
        folder: of the files.
        stem: begins their names.
        pieces: of which the tensors are, by name; their places go into the headers.
    """
    parts: list[list[str]] = [[]]  # one empty file if there are none
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    on_card = any(tensor.is_cuda for tensor in tensors.values())
    stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) if on_card else None
    for number, names in enumerate(parts, 1):
        copies = {}
        for name in names:
            tensor = tensors[name]
            copies[name] = _in_host_memory(tensor, stage if tensor.is_cuda else None)
        header = None
        if pieces is not None:
            offsets = {name: {"saved_offsets": [pieces[name].begin]} for name in names}
            shapes = {name: list(pieces[name].shape) for name in names}
            header = {OFFSETS_KEY: json.dumps(offsets), SHAPES_KEY: json.dumps(shapes)}
        file = stem if len(parts) == 1 else f"{stem}-{number:05d}-of-{len(parts):05d}"
        save_file(copies, folder / f"{file}.safetensors", header)


def _in_host_memory(tensor: Tensor, stage: Tensor | None) -> Tensor:
    """Return a dense copy in host memory, made through bytes of pinned memory, if given."""
    dense = tensor.contiguous()
    if stage is None:
        return dense.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    sources = dense.reshape(-1).view(torch.uint8).split(len(stage))
    targets = host.reshape(-1).view(torch.uint8).split(len(stage))
    for source, target in zip(sources, targets, strict=True):
        target.copy_(stage[: target.numel()].copy_(source))
    return host


class StoredStates:
    """The optimizer states of a folder, read one by one.

    Attributes:
        names: of all states.

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
                offsets = json.loads(header.get(OFFSETS_KEY, "{}"))
                shapes = json.loads(header.get(SHAPES_KEY, "{}"))
                for name in opened.keys():  # noqa: SIM118  no mapping
                    begin = offsets[name]["saved_offsets"][0] if name in offsets else None
                    self._places.setdefault(name, []).append((file, begin, shapes.get(name, [])))
        self.names = list(self._places)

    def of(self, weight: str) -> dict[str, Tensor]:
        """Return the states of a weight, by their names without the weight's."""
        prefix = f"{weight}:"
        names = [name for name in self.names if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.read(name) for name in names}

    def read(self, name: str) -> Tensor:
        """Return a whole state, in host memory.

        Raises:
            ValueError: a piece of it is missing.
        """
        whole = None
        read_elements = 0
        for file, begin, shape in self._places[name]:
            with safe_open(file, "pt") as opened:
                tensor = opened.get_tensor(name)
            if begin is None:
                return tensor
            if whole is None:
                whole = torch.empty(shape, dtype=tensor.dtype)
            whole.view(-1)[begin : begin + len(tensor)] = tensor
            read_elements += len(tensor)
        assert whole is not None
        if read_elements != whole.numel():
            raise ValueError(
                f"optimizer state {name!r}: {read_elements} of {whole.numel()} elements are there"
            )
        return whole


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """Return all states by name, whole, in host memory.

    Raises:
        FileNotFoundError: the folder holds none.
        ValueError: a piece of a state is missing.
    """
    stored = StoredStates(folder)
    return {name: stored.read(name) for name in stored.names}
