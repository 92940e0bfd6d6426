"""Records: the weights of one expert as one contiguous run of bytes, in the format they have.

A record holds both products of an expert, their scales and biases, each tensor at a multiple of
``PART_ALIGNMENT`` bytes. Records of a layer have one layout, so the same tensor of many records in
one memory is a strided tensor ``[S, …]``. What all experts of a layer share (the code of nested
scales) is not in records.

A format says which tensors an expert has and how products read them from such memory. Values are
never changed: a format holds the bytes of the weight that it was made from. Scales of NF4 that
straddle two experts are kept as the fp32 numbers that they stand for, which dequantise to the same
values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from chronicals.kernels.dense_slots import dense_slots
from chronicals.kernels.expert_stacks import ExpertStack
from chronicals.kernels.few_tokens_product import multiplies_few_tokens
from chronicals.kernels.fp8 import Scaled
from chronicals.kernels.fp8_experts import (
    EXPERT_DTYPE,
    fp8_experts_transposed,
    fp8_quantize_experts,
)
from chronicals.kernels.fused_experts import ExpertWeights, of_slots
from chronicals.kernels.host_memory import sent
from chronicals.kernels.nf4 import Scales, quantize_scales
from chronicals.kernels.nf4_product import MOST_ROWS
from chronicals.quantization.experts import PackedExperts, class_module
from chronicals.quantization.nf4 import FourBits, Packed
from chronicals.quantization.packed import PackedWeight

PART_ALIGNMENT = 256
"""Bytes at whose multiples the tensors of a record begin; the copy engine of a card asks for 16."""

Buffer = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""A function that returns memory of a shape and dtype, valid until the next call with its shape."""


@dataclass(frozen=True)
class Part:
    """A tensor that each expert has.

    Attributes:
        dtype: its dtype.
        shape: its shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Places:
    """Places of the records of a wave's experts, on the device of the products.

    Attributes:
        slots: int32 ``[n]``, the record of each expert; -1, or any number, for those without rows.
        in_order: int32 ``[n]``, place of each expert among those with rows; -1 for the others.
        records: int32 ``[m]``, the records of the experts with rows.
        on_host: the same on the host.
    """

    slots: Tensor
    in_order: Tensor
    records: Tensor
    on_host: Sequence[int]

    @classmethod
    def of(cls, slots: Sequence[int], device: torch.device) -> Places:
        """Return the places of slots that the host knows, -1 for experts without rows, by one copy."""
        records = [slot for slot in slots if slot >= 0]
        in_order = []
        count = 0
        for slot in slots:
            in_order.append(count if slot >= 0 else -1)
            count += slot >= 0
        together = sent([*slots, *in_order, *records], torch.int32, device)
        there, order_there, records_there = together.split([len(slots), len(slots), len(records)])
        return cls(there, order_there, records_there, records)

    @classmethod
    def on_device(cls, slots: Tensor) -> Places:
        """Return the places of slots that the host does not know; no dense values can be made."""
        return cls(slots, slots, slots[:0], [])


@dataclass(frozen=True)
class InMemory:
    """Records in a memory ``[S, bytes]``, from which products of some experts read.

    Attributes:
        views: tensors ``[S, …]`` by the names of a format's parts.
        places: the experts.
        buffer: memory for dequantised values.
    """

    views: Mapping[str, Tensor]
    places: Places
    buffer: Buffer

    def chosen(self, name: str) -> Tensor:
        """Return a part of the experts with rows, ``[m, …]``, in memory of its own."""
        return self.views[name][self.places.records]

    def of_all(self, name: str) -> Tensor:
        """Return a small part of all experts, ``[n, …]``; any values for those without rows."""
        return of_slots(self.views[name], self.places.slots)


class StackFormat(ABC):
    """Format of a stacked weight of a layer's experts in records.

    Attributes:
        count: the number E of experts.
        parts: the tensors of an expert by name.
        shape: shape of the stacked weight in its class, ``(E, …)``.
        dtype: dtype of the values that products read.
        transposed: True if the class has ``[E, K, N]``.
    """

    count: int
    parts: dict[str, Part]
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool
    in_fp8 = False

    @abstractmethod
    def of_expert(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of an expert, in the order of ``parts``."""

    @abstractmethod
    def weights(self, memory: InMemory) -> ExpertWeights:
        """Return the weights of experts as a product reads them from records."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the format for logs."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the values that a product of many rows makes of an expert; 0 if it makes none."""
        return 0

    def tokens_in_place(self, views: Mapping[str, Tensor]) -> int | None:
        """Return the tokens of a pass, at most, whose products read records in place.

        None if those of any number do.

        Args:
            views: the records, as in ``InMemory``.
        """
        return None

    def to(self, device: torch.device) -> None:  # noqa: B027  most formats share nothing
        """Move what all experts share to the device of the products."""

    @abstractmethod
    def forget_weights(self) -> None:
        """Release the tensors that records were made from."""


@dataclass
class PlainRecords(StackFormat):
    """A weight in 16 or 32 bits.

    Attributes:
        shape, dtype: of the stacked weight.
        transposed: as in ``StackFormat``.
        expert: returns the matrix of an expert; None once records were made.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False
    expert: Callable[[int], Tensor] | None = None

    def __post_init__(self) -> None:
        self.count = self.shape[0]
        self.parts = {"values": Part(self.dtype, tuple(self.shape[1:]))}

    @classmethod
    def of(cls, weight: Tensor, transposed: bool = False) -> PlainRecords:
        """Return the format of a stacked weight ``[E, …]``, or of a bias ``[E, N]``."""
        values = weight.detach()
        return cls(tuple(values.shape), values.dtype, transposed, lambda number: values[number])

    def of_expert(self, number: int) -> dict[str, Tensor]:
        """Return the values."""
        assert self.expert is not None
        return {"values": self.expert(number)}

    def weights(self, memory: InMemory) -> ExpertWeights:
        """Return the records themselves, and where those of the experts are."""
        return ExpertWeights(memory.views["values"], self.transposed, slots=memory.places.slots)

    def forget_weights(self) -> None:
        """Release the stacked weight."""
        self.expert = None

    @property
    def label(self) -> str:
        """The dtype."""
        return str(self.dtype).removeprefix("torch.")


class PackedRecords(StackFormat):
    """A packed weight, whose chosen experts are dequantised for each product.

    Args:
        weight: the packed weight ``[E · N, K]``.
        shape: its shape in the class.
        transposed: True if the class has ``[E, K, N]``.
        turned: True if the matrix of an expert is the transpose of the class's.
    """

    def __init__(
        self,
        weight: PackedWeight,
        shape: tuple[int, ...],
        transposed: bool = False,
        turned: bool = False,
    ):
        self.count = shape[0]
        self.shape = tuple(shape)
        self.dtype = weight.dtype
        self.transposed = transposed
        self.turned = turned
        rows, width = weight.shape
        self.matrix = rows // self.count, width
        self.one, divided = weight.by_expert(self.count)
        self.parts = {
            name: Part(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in divided.items()
        }
        self._expert: Callable[[int], dict[str, Tensor]] | None = lambda number: {
            name: tensor[number] for name, tensor in divided.items()
        }

    @classmethod
    def one_by_one(
        cls,
        expert: Callable[[int], PackedWeight],
        shape: tuple[int, ...],
        transposed: bool = False,
        turned: bool = False,
    ) -> PackedRecords:
        """Return the format of a weight of which each expert is packed by itself.

        Args:
            expert: returns the packed weight ``[N, K]`` of an expert.
            shape: shape of the stacked weight in its class.
            transposed: True if the class has ``[E, K, N]``.
            turned: True if the matrix of an expert is the transpose of the class's.
        """
        first = expert(0)
        found = cls(first, (1, *shape[1:]), transposed, turned)
        found.count = shape[0]
        found.shape = tuple(shape)

        def of_expert(number: int) -> dict[str, Tensor]:
            _, divided = expert(number).by_expert(1)
            return {name: tensor[0] for name, tensor in divided.items()}

        found._expert = of_expert
        return found

    def of_expert(self, number: int) -> dict[str, Tensor]:
        """Return codes and scales."""
        assert self._expert is not None
        return self._expert(number)

    def forget_weights(self) -> None:
        """Release the packed weight; of what experts have of their own the shapes stay."""
        self._expert = None
        own = {
            name: tensor.to("meta")
            for name, tensor in self.one.tensors.items()
            if tensor is not None and name in self.parts
        }
        self.one = self.one.with_tensors({**self.one.tensors, **own})

    def to(self, device: torch.device) -> None:
        """Move the shared tensors."""
        shared = self.one.tensors
        for name, tensor in shared.items():
            if tensor is not None and name not in self.parts:
                shared[name] = tensor.to(device)
        self.one = self.one.with_tensors(shared)

    def at(self, memory: InMemory, slot: int) -> PackedWeight:
        """Return the weight of the expert in a record."""
        own = {name: view[slot] for name, view in memory.views.items()}
        return self.one.with_tensors({**self.one.tensors, **own}, self.matrix, self.dtype)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dequantised values of an expert."""
        return math.prod(self.matrix) * self.dtype.itemsize

    def tokens_in_place(self, views: Mapping[str, Tensor]) -> int:
        """Return the tokens of a pass, at most, whose products dequantise inside them."""
        stack = self.stack_of(views, self.transposed)
        codes = next(iter(views.values()))
        x = torch.empty(0, dtype=self.dtype, device=codes.device)
        if stack is None or not multiplies_few_tokens(x):
            return 0
        return min(stack.most_tokens, MOST_ROWS)

    def stack_of(self, views: Mapping[str, Tensor], transposed: bool) -> ExpertStack | None:
        """Return records as products of few tokens read them in place, or None if they cannot."""
        if transposed != self.turned:
            return None
        count = len(next(iter(views.values())))
        rows, width = self.matrix
        one = self.one.with_tensors(
            {**self.one.tensors, **views}, (count * rows, width), self.dtype
        )
        stack: ExpertStack | None = one.expert_stack(count)
        return stack

    def weights(self, memory: InMemory) -> ExpertWeights:
        """Return the experts with rows, dequantised by each call and numbered in their order."""
        stack = SlotStack(self, memory)
        return ExpertWeights(stack, self.transposed, slots=memory.places.slots)

    @property
    def label(self) -> str:
        """Name of the packed format."""
        return self.one.label


@dataclass
class SlotStack:
    """The packed weights of some records, dequantised by a call.

    It is the ``PackedStack`` of ``kernels/fused_experts.py``.

    Attributes:
        form: their format.
        memory: where the records are.
    """

    form: PackedRecords
    memory: InMemory
    dtype: torch.dtype = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = self.form.dtype
        self.shape = (len(self.memory.places.on_host), *self.form.shape[1:])

    def __call__(self) -> Tensor:
        """Return the values in the class's shape, ``[m, …]`` of the m experts with rows."""
        places = self.memory.places
        matrices = self.memory.buffer((len(places.on_host), *self.form.matrix), self.dtype)
        stack = self.form.stack_of(self.memory.views, self.form.turned)
        if stack is not None:
            dense_slots(stack, places.records, matrices)
        else:
            for matrix, slot in zip(matrices, places.on_host):
                self.form.at(self.memory, slot).into(matrix)
        return matrices.transpose(1, 2) if self.form.turned else matrices

    @property
    def dense_slots(self) -> Tensor:
        """Place of each expert in what a call returns."""
        return self.memory.places.in_order

    def expert_stack(self, transposed: bool) -> ExpertStack | None:
        """Return the records as products of few tokens read them in place, or None."""
        return self.form.stack_of(self.memory.views, transposed)


class FP8Records(StackFormat):
    """A frozen weight of products in FP8, of which records hold the rows and their scale.

    Args:
        expert: returns the values ``[N, K]`` of an expert, as the products read them, and its scale.
        shape: shape of the stacked weight in its class.
        dtype: dtype of the products' results.
        transposed: True if the class has ``[E, K, N]``.
    """

    in_fp8 = True

    @property
    def dense_bytes(self) -> int:
        """Bytes of the transposed values of an expert, which the backward pass makes."""
        return self.parts["values"].bytes

    def __init__(
        self,
        expert: Callable[[int], Scaled],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        transposed: bool,
    ):
        self._expert: Callable[[int], Scaled] | None = expert
        self.shape = tuple(shape)
        self.count, *sizes = self.shape
        self.dtype = dtype
        self.transposed = transposed
        rows = sizes[::-1] if transposed else sizes
        self.parts = {
            "values": Part(EXPERT_DTYPE, tuple(rows)),
            "scale": Part(torch.float32, ()),
        }

    def of_expert(self, number: int) -> dict[str, Tensor]:
        """Return values and scale."""
        assert self._expert is not None
        values, scale = self._expert(number)
        return {"values": values, "scale": scale}

    def forget_weights(self) -> None:
        """Release the weight."""
        self._expert = None

    def weights(self, memory: InMemory) -> ExpertWeights:
        """Return the records themselves, and where those of the experts are."""
        return ExpertWeights(None, in_fp8=_SlotsInFP8(memory), slots=memory.places.slots)

    @property
    def label(self) -> str:
        """Name of the format."""
        return "FP8"


class _SlotsInFP8:
    """Rows in FP8 in records; the ``InFP8`` of ``kernels/fused_experts.py``.

    Attributes:
        column_slots: place of each expert in ``columns``.
    """

    def __init__(self, memory: InMemory):
        self.memory = memory
        self.column_slots = memory.places.in_order

    def rows(self) -> Scaled:
        """Return the values and scales of all records."""
        return Scaled(self.memory.views["values"], self.memory.views["scale"])

    def columns(self, scale: Tensor) -> Scaled:
        """Return the transposed values of the experts with rows, and the scales of all."""
        rows = Scaled(self.memory.chosen("values"), self.memory.chosen("scale"))
        return Scaled(fp8_experts_transposed(rows).values, self.memory.of_all("scale"))


@dataclass(frozen=True)
class RecordLayout:
    """Places of the tensors of an expert in its record.

    Attributes:
        parts: by name of the weight and name of the part: the part, and its first byte.
        bytes: of a record.
    """

    parts: dict[tuple[str, str], tuple[Part, int]]
    bytes: int

    @classmethod
    def of(cls, formats: Mapping[str, StackFormat]) -> RecordLayout:
        """Return the layout of a layer's weights, given their formats by name."""
        parts: dict[tuple[str, str], tuple[Part, int]] = {}
        end = 0
        for weight, form in formats.items():
            for name, part in form.parts.items():
                parts[weight, name] = part, end
                end += -(-part.bytes // PART_ALIGNMENT) * PART_ALIGNMENT
        return cls(parts, end)

    def write(self, record: Tensor, formats: Mapping[str, StackFormat], number: int) -> None:
        """Write an expert's tensors to its record, uint8 ``[bytes]``; gaps become zeros.

        Raises:
            ValueError: a tensor has another size or dtype than those of the other experts.
        """
        record.zero_()
        for weight, form in formats.items():
            for name, tensor in form.of_expert(number).items():
                part, begin = self.parts[weight, name]
                if tuple(tensor.shape) != part.shape or tensor.dtype != part.dtype:
                    raise ValueError(
                        f"{weight} of expert {number}: is {tensor.dtype} {list(tensor.shape)}, "
                        f"and {part.dtype} {list(part.shape)} of the others"
                    )
                place = record[begin : begin + part.bytes].view(part.dtype).view(part.shape)
                place.copy_(tensor)

    def views(self, memory: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return the tensors ``[S, …]`` of records in ``memory``, uint8 ``[S, bytes]``.

        The result is by name of the weight and name of the part.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for (weight, name), (part, begin) in self.parts.items():
            bytes_of_part = memory[:, begin : begin + part.bytes]
            view = bytes_of_part.view(part.dtype).unflatten(1, part.shape or (1,))
            found.setdefault(weight, {})[name] = view if part.shape else view[:, 0]
        return found


def quantised_records(
    expert: Callable[[int], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed: bool,
    kind: FourBits,
) -> PackedRecords:
    """Return the format of a weight that is quantised to 4 bits expert by expert.

    Codes and scales are those of the stack quantised as a whole: where scales are nested, each
    expert is quantised once for them, and again when its record is written.

    Args:
        expert: returns the values of an expert, ``[N, K]``.
        shape: shape of the stacked weight, ``(E, N, K)`` in its class.
        dtype: dtype of the dequantised values.
        transposed: True if the class has ``[E, K, N]``.
        kind: the 4 bits.
    """
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    plain = replace(kind, scale_block=None)

    def codes_of(number: int) -> Packed:
        return plain.quantise(expert(number).to(device)).moved(torch.device("cpu"))

    count, rows, width = shape
    absmax = torch.cat([codes_of(number).scales.absmax for number in range(count)])
    scales = Scales(absmax)
    if kind.scale_block is not None:
        # There the stack would be quantised, and the mean of all scales has other bits elsewhere.
        scales = quantize_scales(absmax.to(device))
    empty = torch.empty(0, dtype=torch.uint8)
    matrix = count * rows, width
    whole = Packed(empty, scales, matrix, dtype, kind.block, kind.code, _dtype(kind, dtype))
    found = PackedRecords(whole.moved(torch.device("cpu")), shape, transposed)
    scales_of = found._expert
    found.parts["codes"] = Part(torch.uint8, (rows * width // 2,))

    def of_expert(number: int) -> dict[str, Tensor]:
        assert scales_of is not None
        return {**scales_of(number), "codes": codes_of(number).codes.view(-1)}

    found._expert = of_expert
    return found


def _dtype(kind: FourBits, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight before it was quantised."""
    return dtype if kind.quantized_from is None else getattr(torch, kind.quantized_from)


def formats_of(experts: nn.Module, in_fp8: bool = False) -> dict[str, StackFormat]:
    """Return how the weights and biases of a layer's experts lie in records, by name.

    Args:
        experts: the module, plain or packed.
        in_fp8: quantise 16-bit weights to the rows of products in FP8.
    """
    inner = class_module(experts)
    transposed = bool(getattr(inner, "is_transposed", False))
    formats: dict[str, StackFormat] = {}
    for name, parameter in experts.named_parameters(recurse=False):
        if isinstance(experts, PackedExperts) and name in experts.stacked:
            shape = experts.stacked[name]
            turned = name in experts.transposed
            formats[name] = PackedRecords(experts.packed(name), shape, transposed, turned)
        elif in_fp8 and parameter.ndim == 3:
            formats[name] = _in_fp8(parameter.detach(), transposed)
        else:
            formats[name] = PlainRecords.of(parameter, transposed)
    return formats


def _in_fp8(weight: Tensor, transposed: bool) -> FP8Records:
    """Return a weight's records in FP8, each expert quantised when its record is written."""

    def of_expert(number: int) -> Scaled:
        one = weight[number : number + 1]
        rows, _ = fp8_quantize_experts(one.mT.contiguous() if transposed else one)
        assert rows is not None
        return Scaled(rows.values[0], rows.scale[0])

    return FP8Records(of_expert, tuple(weight.shape), weight.dtype, transposed)
