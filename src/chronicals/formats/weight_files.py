"""Safetensors files, read and written a tensor at a time, so that no more than one is in memory.

A file is 8 bytes (the length of the header, little endian), the header in JSON (by name: dtype,
shape and where in what follows the tensor lies) and the tensors' bytes (format of safetensors 0.3
and later).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes whose values can be changed; tensors of others are copied unchanged."""

WRITABLE_DTYPES = {
    **FLOAT_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Dtypes that can be written."""

COPY_BYTES = 1 << 20
"""Bytes that are copied at a time."""

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: in the names of safetensors.
        begin: of its bytes in the file.
        end: of its bytes in the file.
        is_packed: files hold it as codes, and it is dequantised when it is read.
    """

    is_packed: ClassVar[bool] = False
    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Number of bytes in the file."""
        return self.end - self.begin

    def read(self) -> Tensor:
        """Return the tensor; raises ValueError if its dtype is not one of ``FLOAT_DTYPES``."""
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{self.file}: {self.name} is {self.dtype}, not one of {', '.join(FLOAT_DTYPES)}"
            )
        return self.content().view(FLOAT_DTYPES[self.dtype]).view(self.shape)

    def content(self) -> Tensor:
        """Return its bytes, uint8, of any dtype; raises ValueError if the file was cut."""
        content = bytearray(self.bytes)
        with self.file.open("rb") as file:
            file.seek(self.begin)
            if file.readinto(content) < len(content):
                raise ValueError(f"{self.file}: ends within {self.name}; download or save it again")
        return (
            torch.frombuffer(content, dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8)
        )

    def copy_to(self, out: BinaryIO) -> None:
        """Copy its bytes, ``COPY_BYTES`` at a time."""
        with self.file.open("rb") as file:
            file.seek(self.begin)
            left = self.end - self.begin
            while left and (piece := file.read(min(left, COPY_BYTES))):
                out.write(piece)
                left -= len(piece)
        if left:
            raise ValueError(f"{self.file}: ends within {self.name}; download or save it again")


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: those of its index, if it has one.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    index = folder / INDEX_FILE
    if index.exists():
        files = [
            folder / name
            for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
        ]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.exists():
            raise ValueError(
                f"{folder}: {file.name} is missing; weights are read from safetensors files alone"
            )
    return files


def tensors_in(file: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a file in the order of their bytes.

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
        yield StoredTensor(
            file, name, about["dtype"], tuple(about["shape"]), 8 + length + begin, 8 + length + end
        )


@dataclass(frozen=True)
class NewTensor:
    """A tensor that is to be written.

    Attributes:
        dtype: in the names of safetensors.
        made: returns the tensor, in any dtype, when its turn comes; or a stored one, to be copied.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    made: Callable[[], Tensor | StoredTensor]

    @property
    def bytes(self) -> int:
        """Number of bytes that the tensor takes in a file."""
        if self.dtype in WRITABLE_DTYPES:
            return torch.Size(self.shape).numel() * WRITABLE_DTYPES[self.dtype].itemsize
        made = self.made()
        assert isinstance(made, StoredTensor), (
            f"{self.name}: a tensor of {self.dtype} can only be copied"
        )
        return made.bytes

    def cast(self, made: Tensor | StoredTensor) -> Tensor:
        """Return what ``made`` returned in the dtype that is written.

        Raises:
            ValueError: a value is too large for that.
        """
        if isinstance(made, StoredTensor):
            if made.dtype not in FLOAT_DTYPES:
                return made.content().view(WRITABLE_DTYPES.get(self.dtype, torch.uint8))
            made = made.read()
        cast = made.to(WRITABLE_DTYPES[self.dtype])
        if self.dtype == "F16" and not torch.isfinite(cast).all() and torch.isfinite(made).all():
            largest = float(made.abs().max())
            raise ValueError(
                f"{self.name}: has {largest:.3g}, and float16 ends at 65504; write bfloat16 instead"
            )
        return cast


def write_tensors(target: Path, tensors: list[NewTensor]) -> None:
    """Write a file, one tensor after the other.

    Raises:
        ValueError: a value is too large for its dtype; the message names the tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            made = tensor.made()
            if isinstance(made, StoredTensor):
                made.copy_to(out)
            else:
                values = tensor.cast(made).contiguous()
                out.write(values.view(-1).view(torch.uint8).numpy().data)
