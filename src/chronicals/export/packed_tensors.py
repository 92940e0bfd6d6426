"""Weights in bitsandbytes' 4 bits among the tensors of files, as the dense weights that they
stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from chronicals.formats.weight_files import FLOAT_DTYPES, StoredTensor
from chronicals.quantization.bitsandbytes_format import (
    ENTRIES,
    STATE,
    read_shape,
    read_weight,
    weights_among,
)

NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
TYPES = {**FLOAT_DTYPES, "U8": torch.uint8}


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A weight that is read dequantized in fp32, and copied in its dtype.

    Attributes:
        dtype: that it had before it was quantized.
        begin, end: 0 and its bytes.
        parts: the tensors that are stored of it, by name, in whatever files.
    """

    parts: Mapping[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, codes: StoredTensor, parts: Mapping[str, StoredTensor]) -> PackedTensor:
        """Raises ValueError where what describes it is damaged."""
        state = next(name for name in parts if f".{STATE}" in name)
        shape, dtype = read_shape(state, _read(parts[state]))
        return cls(
            codes.file,
            codes.name,
            NAMES[dtype],
            shape,
            0,
            shape[0] * shape[1] * dtype.itemsize,
            parts,
        )

    def read(self) -> Tensor:
        """Raises ValueError where one of its tensors is missing or damaged."""
        packed = read_weight(self.name, {name: _read(part) for name, part in self.parts.items()})
        return packed.to(torch.float32).dense()

    def copy_to(self, out: BinaryIO) -> None:
        rounded = self.read().to(FLOAT_DTYPES[self.dtype])
        out.write(rounded.view(-1).view(torch.uint8).numpy().data)


def unpacked(files: Mapping[Path, list[StoredTensor]]) -> dict[Path, list[StoredTensor]]:
    """The same files with dense weights in place of packed ones and of what is stored beside
    them.
    """
    there = {stored.name: stored for tensors in files.values() for stored in tensors}
    parts = {
        weight: {
            name: there[name]
            for name in (weight, *(f"{weight}.{entry}" for entry in ENTRIES))
            if name in there
        }
        for weight in weights_among(there)
    }
    beside = {name for weight, names in parts.items() for name in names if name != weight}
    return {
        file: [
            PackedTensor.of(stored, parts[stored.name]) if stored.name in parts else stored
            for stored in tensors
            if stored.name not in beside
        ]
        for file, tensors in files.items()
    }


def _read(stored: StoredTensor) -> Tensor:
    if stored.dtype not in TYPES:
        raise ValueError(
            f"{stored.file}: {stored.name} is {stored.dtype}, not one of {', '.join(TYPES)}"
        )
    content = bytearray(stored.end - stored.begin)
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        file.readinto(content)
    return torch.frombuffer(content, dtype=TYPES[stored.dtype]).view(stored.shape)
