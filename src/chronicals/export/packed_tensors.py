"""Packed weights among the tensors of files, as the dense weights that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from chronicals.formats.weight_files import FLOAT_DTYPES, StoredTensor
from chronicals.quantization.packed import PACKED_FORMATS, PackedWeight

_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
_TYPES = {**FLOAT_DTYPES, "U8": torch.uint8}


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A weight that is read dequantized in fp32, and copied in its dtype.

    Attributes:
        dtype: that it had before it was quantized.
        begin, end: 0 and its bytes.
        parts: the tensors that are stored of it, by name, in whatever files.
        form: the format of the weight.
    """

    parts: Mapping[str, StoredTensor] = field(default_factory=dict)
    form: type[PackedWeight] = PackedWeight

    @classmethod
    def of(
        cls, name: str, form: type[PackedWeight], parts: Mapping[str, StoredTensor]
    ) -> PackedTensor:
        """Return the weight of this name.

        Args:
            parts: its tensors, the codes first.

        Raises:
            ValueError: what describes it is damaged.
        """
        shapes = {part: tuple(stored.shape) for part, stored in parts.items()}
        shape, dtype = form.stored_shape(name, shapes, lambda part: _read(parts[part]))
        codes = next(iter(parts.values()))
        size = torch.Size(shape).numel() * dtype.itemsize
        return cls(codes.file, name, _NAMES[dtype], shape, 0, size, parts, form)

    @property
    def is_packed(self) -> bool:
        return True

    def read(self) -> Tensor:
        """Raises ValueError where one of its tensors is missing or damaged."""
        parts = {name: _read(part) for name, part in self.parts.items()}
        return self.form.read_dense(self.name, parts)

    def copy_to(self, out: BinaryIO) -> None:
        rounded = self.read().to(FLOAT_DTYPES[self.dtype])
        out.write(rounded.view(-1).view(torch.uint8).numpy().data)


def unpacked(files: Mapping[Path, list[StoredTensor]]) -> dict[Path, list[StoredTensor]]:
    """Return the same files with dense weights in place of packed ones and of what is stored
    beside them.
    """
    there = {stored.name: stored for tensors in files.values() for stored in tensors}
    weights: dict[str, PackedTensor] = {}
    beside = set[str]()
    for form in PACKED_FORMATS.values():
        for name, (codes, *others) in form.stored_weights(there.keys()).items():
            beside |= set(others)
            if codes in there:
                parts = {part: there[part] for part in (codes, *others)}
                weights[codes] = PackedTensor.of(name, form, parts)
    return {
        file: [weights.get(stored.name, stored) for stored in tensors if stored.name not in beside]
        for file, tensors in files.items()
    }


def _read(stored: StoredTensor) -> Tensor:
    if stored.dtype not in _TYPES:
        raise ValueError(
            f"{stored.file}: {stored.name} is {stored.dtype}, not one of {', '.join(_TYPES)}"
        )
    content = bytearray(stored.end - stored.begin)
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        file.readinto(content)
    return torch.frombuffer(content, dtype=_TYPES[stored.dtype]).view(stored.shape)
