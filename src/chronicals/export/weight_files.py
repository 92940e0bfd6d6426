"""Safetensors files, read and written a tensor at a time, so that no more than one is in memory.

A file is 8 bytes (the length of the header, little endian), the header in JSON (by name: dtype, shape and where in what follows
the tensor lies) and the tensors' bytes (format of safetensors 0.3 and later).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those that can be changed; tensors of others are copied as they are."""

PIECE = 1 << 20
"""Bytes that are copied at a time."""

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: as safetensors names it.
        begin, end: bytes in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> Tensor:
        """Raises ValueError where its dtype is not one of ``DTYPES``."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.file}: {self.name} is {self.dtype}, not one of {', '.join(DTYPES)}")
        with self.file.open("rb") as file:
            file.seek(self.begin)
            content = bytearray(file.read(self.end - self.begin))
        return torch.frombuffer(content, dtype=DTYPES[self.dtype]).view(self.shape) if content else torch.empty(self.shape)

    def copy_to(self, out: BinaryIO) -> None:
        """Its bytes, a few at a time."""
        with self.file.open("rb") as file:
            file.seek(self.begin)
            left = self.end - self.begin
            while left and (piece := file.read(min(left, PIECE))):
                out.write(piece)
                left -= len(piece)
        if left:
            raise ValueError(f"{self.file}: ends within {self.name}; download or save it again")


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a model, those of its index where it has one.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.exists():
            raise ValueError(f"{folder}: {file.name} is missing; weights are read from safetensors files alone")
    return files


def tensors_in(file: Path) -> Iterator[StoredTensor]:
    """In the order of their bytes.

    Raises:
        ValueError: it is no safetensors file, or was cut.
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        first = content.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file}: no safetensors file, or cut; download or save it again")
        header: dict[str, Any] = json.loads(content.read(length))
    header.pop("__metadata__", None)
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = about["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{file}: ends within {name}; download or save it again")
        yield StoredTensor(file, name, about["dtype"], tuple(about["shape"]), 8 + length + begin, 8 + length + end)


def write_file(
    target: Path, tensors: list[StoredTensor], changed: Callable[[StoredTensor], Tensor | None],
    shapes: Mapping[str, torch.Size], dtype: str | None = None,
) -> None:  # fmt: skip
    """Write a file with the same names, one tensor after the other.

    Args:
        tensors: what the file holds.
        changed: called for each in turn; the tensor that is written in its place, or None.
        shapes: of those that ``changed`` gives another shape.
        dtype: of ``DTYPES``, of all that have one of those; by default each keeps its own.

    Raises:
        ValueError: a value is too large for ``dtype``; the message names the tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    kinds = {stored.name: dtype if dtype and stored.dtype in DTYPES else stored.dtype for stored in tensors}
    for stored in tensors:
        shape, kind = list(shapes.get(stored.name, stored.shape)), kinds[stored.name]
        size = (stored.end - stored.begin) * torch.Size(shape).numel() // max(torch.Size(stored.shape).numel(), 1)
        if kind != stored.dtype:
            size = size // DTYPES[stored.dtype].itemsize * DTYPES[kind].itemsize
        header[stored.name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for stored in tensors:
            tensor, kind = changed(stored), kinds[stored.name]
            if tensor is None and kind != stored.dtype:
                tensor = stored.read()
            if tensor is None:
                stored.copy_to(out)
            else:
                out.write(_cast(tensor, kind, stored).contiguous().view(-1).view(torch.uint8).numpy().data)


def _cast(tensor: Tensor, kind: str, stored: StoredTensor) -> Tensor:
    cast = tensor.to(DTYPES[kind])
    if kind == "F16" and not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
        raise ValueError(
            f"{stored.name}: has {float(tensor.abs().max()):.3g}, and float16 ends at 65504; write bfloat16 instead"
        )
    return cast
