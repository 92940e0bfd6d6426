"""Reads experts from a model's safetensors files, one matrix at a time.

Files hold one matrix an expert (gate, up and down by themselves), or the stacks of a layer, of which
one expert's part is read. At no time more than the matrices of one expert are in memory beside the
records that they are written to, and what their quantisation makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.formats.tensor_names import DOWN, GATE, STACK_NAME, UP, Expert
from chronicals.formats.weight_files import FLOAT_DTYPES, StoredTensor, files_of, tensors_in
from chronicals.moe.offload.errors import NotExpertByExpert, record_error
from chronicals.quantization import FourBits, PackedWeight
from chronicals.quantization.expert_records import (
    PackedRecords,
    PlainRecords,
    StackFormat,
    quantised_records,
)
from chronicals.quantization.fp8_blocks import SCALES, STORED, FP8Blocks

_LAYER = re.compile(r"layers\.(\d+)\.")

_ROLES = {"gate_up_proj": (GATE, UP), "down_proj": (DOWN,)}
"""Matrices of files that a stacked weight of the class consists of, in order."""


class ExpertFiles:
    """The experts in the files of a folder.

    Args:
        folder: a folder with safetensors files.
        packed: packed format of the stacks in the files; None for 16 or 32 bits.

    Raises:
        ValueError: a file is missing or was cut; the message names the tensor.
    """

    def __init__(self, folder: Path, packed: type[PackedWeight] | None = None):
        self.folder = folder
        self.packed = packed
        self._single: dict[tuple[int, int, str], StoredTensor] = {}
        self._scales: dict[tuple[int, int, str], StoredTensor] = {}
        self._stacks: dict[tuple[int, str], StoredTensor] = {}
        for file in files_of(folder):
            for tensor in tensors_in(file):
                self._add(tensor)

    def _add(self, tensor: StoredTensor) -> None:
        of_scales = tensor.name.endswith(SCALES)
        expert = Expert.named(tensor.name.removesuffix(SCALES))
        if expert is not None:
            matrices = self._scales if of_scales else self._single
            matrices[expert.layer, expert.number, expert.role] = tensor
            return
        name = tensor.name
        part = ""
        for suffix in self.packed.STACK_PARTS if self.packed is not None else ():
            if name.endswith(suffix):
                name, part = name.removesuffix(suffix), suffix
        match = STACK_NAME.fullmatch(name)
        if match is not None:
            self._stacks[int(match[1]), f"{match[2]}{match[3] or ''}{part}"] = tensor

    def formats(
        self, path: str, module: Any, dtype: torch.dtype, quantise: FourBits | None
    ) -> dict[str, StackFormat]:
        """Return how the weights of a module of experts lie in records.

        Args:
            path: path of the module in the model.
            module: the module, on the meta device.
            dtype: dtype of the values.
            quantise: 4 bits that plain stacks are quantised to; None to keep them.

        Raises:
            NotExpertByExpert: a weight is not in the files under a known name.
            ValueError: it has another shape.
        """
        layer = int(next(iter(_LAYER.findall(path)), -1))
        transposed = bool(getattr(module, "is_transposed", False))
        found: dict[str, StackFormat] = {}
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if self.packed is not None and parameter.ndim == 3:
                found[name] = self._packed_records(path, layer, name, shape, dtype, transposed)
                continue
            if self._in_fp8(layer, name):
                found[name] = self._fp8_records(path, layer, name, shape, dtype)
                continue
            read = self._reader(path, layer, name, shape, dtype)
            if quantise is not None and parameter.ndim == 3:
                found[name] = quantised_records(read, shape, dtype, transposed, quantise)
            else:
                found[name] = PlainRecords(shape, dtype, transposed, read)
        return found

    def _reader(
        self, path: str, layer: int, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Callable[[int], Tensor]:
        """Return a function that reads the matrix, or bias, of an expert."""
        stack = self._stacks.get((layer, name))
        if stack is not None:
            if stack.shape != shape:
                raise ValueError(_another_shape(f"{path}.{name}", stack.shape, shape))
            return lambda expert: self._of_stack(path, stack, expert).to(dtype)
        roles = _ROLES.get(name, ())
        parts = [[self._single.get((layer, e, role)) for role in roles] for e in range(shape[0])]
        if not roles or any(part is None for one in parts for part in one):
            raise NotExpertByExpert(
                f"{path}.{name}: is not in the files of {self.folder} under a known name, neither "
                "as a stack nor expert by expert; load the model first (chronicals.load_model), "
                "and offload that"
            )

        def read(expert: int) -> Tensor:
            matrices = [self._read(path, expert, part) for part in parts[expert] if part]
            whole = torch.cat(matrices).to(dtype)
            if tuple(whole.shape) != shape[1:]:
                there = tuple(whole.shape)
                raise ValueError(
                    _another_shape(f"{path}.{name}, expert {expert}", there, shape[1:])
                )
            return whole

        return read

    def _in_fp8(self, layer: int, name: str) -> bool:
        """Return whether the matrices of a stacked weight are in FP8 with a scale a block."""
        keys = [(layer, 0, role) for role in _ROLES.get(name, ())]
        return any(key in self._single and self._single[key].dtype == STORED for key in keys)

    def _fp8_records(
        self, path: str, layer: int, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> PackedRecords:
        """Return records of a stack whose matrices the files hold in FP8 with a scale a block."""
        keys = [[(layer, expert, role) for role in _ROLES[name]] for expert in range(shape[0])]
        stored = [[(self._single.get(key), self._scales.get(key)) for key in one] for one in keys]
        if any(values is None or scales is None for one in stored for values, scales in one):
            raise ValueError(
                f"{path}.{name}: not every expert is in the files of {self.folder} in FP8 with "
                "scales; download the model again"
            )

        def one(expert: int) -> PackedWeight:
            matrices = [
                (self._codes(path, expert, values), self._read(path, expert, scales))
                for values, scales in stored[expert]
                if values is not None and scales is not None
            ]
            try:
                weight = FP8Blocks.of_matrices(matrices, dtype)
            except ValueError as error:
                raise ValueError(f"{path}.{name}, expert {expert}: {error}") from error
            if weight.shape != shape[1:]:
                named = f"{path}.{name}, expert {expert}"
                raise ValueError(_another_shape(named, weight.shape, shape[1:]))
            return weight

        return PackedRecords.one_by_one(one, shape)

    def _codes(self, path: str, expert: int, tensor: StoredTensor) -> Tensor:
        """Return the bytes of a matrix in FP8, uint8 in its shape."""
        if tensor.dtype != STORED:
            raise record_error(path, expert, f"{tensor.name} is {tensor.dtype}, not {STORED}")
        try:
            return tensor.content().view(tensor.shape)
        except (ValueError, OSError) as error:
            raise record_error(path, expert, str(error)) from error

    def _read(self, path: str, expert: int, tensor: StoredTensor) -> Tensor:
        try:
            return tensor.read()
        except (ValueError, OSError) as error:
            raise record_error(path, expert, str(error)) from error

    def _of_stack(self, path: str, stack: StoredTensor, expert: int) -> Tensor:
        """Return an expert's part of a stored stack, in the dtype of the file."""
        count, *sizes = stack.shape
        each = stack.bytes // count
        begin = stack.begin + expert * each
        own = StoredTensor(stack.file, stack.name, stack.dtype, tuple(sizes), begin, begin + each)
        if stack.dtype in FLOAT_DTYPES:
            return self._read(path, expert, own)
        try:
            return own.content().view(torch.uint8).view(tuple(sizes))
        except (ValueError, OSError) as error:
            raise record_error(path, expert, str(error)) from error

    def _packed_records(
        self,
        path: str,
        layer: int,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool,
    ) -> PackedRecords:
        """Return records of a stack that the files hold in a packed format."""
        form = self.packed
        assert form is not None
        stored = {suffix: self._stacks.get((layer, name + suffix)) for suffix in form.STACK_PARTS}
        if any(part is None for part in stored.values()):
            raise ValueError(f"{path}.{name}: is not packed in the files of {self.folder}")

        def one(expert: int) -> PackedWeight:
            tensors = {
                name + suffix: self._of_stack(path, part, expert)[None]
                for suffix, part in stored.items()
                if part is not None
            }
            return form.read(name, tensors).to(dtype)

        found = PackedRecords.one_by_one(one, shape, transposed, turned=True)
        rows, width = found.matrix
        if (shape[0], width, rows) != shape:
            raise ValueError(_another_shape(f"{path}.{name}", (shape[0], width, rows), shape))
        return found


def _another_shape(name: str, there: Any, here: Any) -> str:
    return (
        f"{name} ({list(there)} there, {list(here)} here): of another shape than config.json says"
    )
