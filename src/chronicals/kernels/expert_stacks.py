"""Stacks: the weights of a layer's experts, one behind another, in the formats that products read.

A stack holds weights ``[N, K]`` in slots, those of all experts or of the few that are on the
device. All slots are equally far apart, but other data may lie between them: a slot can be part of
a record that also holds the expert's other weight, scales and biases. What one slot holds is dense.

``few_tokens_product.py`` reads a stack in place. A stack describes itself by its tensors and by a
``Layout`` of plain integers, which pass through an operator of torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.gguf_blocks import (
    GGUF_GROUP_SIZE,
    GGUF_KINDS,
    dequantize_gguf_reference,
)
from chronicals.kernels.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4_reference
from chronicals.kernels.nf4 import CODE_VALUES, Scales, dequantize_4bit_reference
from chronicals.kernels.nf4_product import MOST_ROWS

FORMAT_16_BIT, FORMAT_FP8, FORMAT_MXFP4, FORMAT_4_BIT, FORMAT_GGUF = range(5)
"""``Layout.format``."""

MOST_TOKENS_IN_16_BITS = 16
"""``ExpertStack.most_tokens`` of 16 bits.

``grouped_product``, whose tiles have 64 rows, reads 8 of 128 experts a token in place, too: on an H200
at 22 % of the copy rate for one token, 69 % for 8 and 91 % for 64, which leaves little to gain there.
"""

GGUF_MOST_TOKENS = {"Q4_0": 16, "Q6_K": 8}
"""``ExpertStack.most_tokens`` of kinds that take the most instructions a value.

Computed for 8 of 128 experts a token, by times of ``gguf_product`` and ``dequantize_gguf`` on an H200:
Q4_0 takes 106 µs for 2²⁶ values in place and 86 dequantised first, Q6_K 247 and 121. In place only
chosen experts are read, so it pays up to 0.8 and 0.5 of the experts; 16 and 8 tokens choose 0.64 and
0.4 of them.
"""

FP8_SCALE_COLUMNS = 128
"""Columns that share an FP8 scale are a multiple of this, or all columns."""


class Layout(NamedTuple):
    """The integers that describe a stack.

    Attributes:
        format: one of the ``FORMAT_`` constants.
        slots, outputs, columns: number of slots, N and K.
        slot, row, column: elements of the first tensor between slots, outputs and columns; for
            packed formats bytes, and ``column`` is 0.
        scale_slot, scale_row: elements of the scales between slots and outputs; ``scale_row`` is
            that of a row of blocks in FP8, and 0 for NF4, whose blocks are numbered through.
        second_slot: elements between slots of the scales' scales (NF4, nested).
        blocks_before: blocks of a slot if the scales' scales go on from slot to slot, else 0.
        block: columns that share a scale; 1 for 16 bit.
        second: outputs that share a scale (FP8), scales that share one (NF4), the position in
            ``GGUF_KINDS`` (GGUF), else 0.
        nested: 1 if the scales are quantised (NF4).
        code: position in ``CODE_VALUES`` (NF4).
    """

    format: int
    slots: int
    outputs: int
    columns: int
    slot: int
    row: int
    column: int = 0
    scale_slot: int = 0
    scale_row: int = 0
    second_slot: int = 0
    blocks_before: int = 0
    block: int = 1
    second: int = 0
    nested: int = 0
    code: int = 0


class ExpertStack(ABC):
    """The weights ``[N, K]`` of experts in slots; subclasses are frozen dataclasses, a format each.

    Their constructors raise ValueError for sizes or dtypes that do not fit.
    """

    @property
    def most_tokens(self) -> int:
        """Tokens up to which a product in place is faster than one over dense values."""
        return MOST_ROWS

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The integers by which a kernel finds the values."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Weight or codes, then what the format has beside them, as the kernel takes them."""

    @abstractmethod
    def dense(self, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a slot, ``[N, K]``, in plain torch.

        Args:
            slot: the slot.
            dtype: dtype of the rows that are multiplied. Values are rounded to it where the kernel
                rounds them, and otherwise wider.
        """


@dataclass(frozen=True)
class StackIn16Bits(ExpertStack):
    """Weights that are not packed: bf16, fp16 or, outside kernels, any dtype.

    Attributes:
        values: ``[slots, N, K]`` with any strides.
    """

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 3:
            raise ValueError(f"values are {tuple(self.values.shape)}: expected [slots, N, K]")

    @property
    def most_tokens(self) -> int:
        """Tokens up to which a product in place is faster than ``grouped_product``."""
        return MOST_TOKENS_IN_16_BITS

    @property
    def layout(self) -> Layout:
        """The integers by which a kernel finds the values."""
        return Layout(FORMAT_16_BIT, *self.values.shape, *self.values.stride())

    @property
    def tensors(self) -> list[Tensor]:
        """The values."""
        return [self.values]

    def dense(self, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a slot."""
        return self.values[slot]


@dataclass(frozen=True)
class StackInFP8(ExpertStack):
    """Weights in e4m3 with fp32 scales of blocks: ``W[n, k] = scale[n // high, k // wide] · value``.

    Products take the scales out of the sums of a block, so the values are never rounded.

    Attributes:
        values: e4m3 ``[slots, N, K]``, a slot dense.
        scales: fp32 ``[slots, ⌈N / high⌉, ⌈K / wide⌉]``, a slot dense.
        high, wide: outputs and columns that share a scale; ``wide`` is at least K or a multiple of
            ``FP8_SCALE_COLUMNS``.
    """

    values: Tensor
    scales: Tensor
    high: int = 128
    wide: int = 128

    def __post_init__(self) -> None:
        if self.values.ndim != 3 or self.values.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"values are {self.values.dtype} {tuple(self.values.shape)}: expected "
                "torch.float8_e4m3fn [slots, N, K]"
            )
        slots, outputs, columns = self.values.shape
        expected = slots, -(-outputs // self.high), -(-columns // self.wide)
        if self.scales.shape != expected or self.scales.dtype != torch.float32:
            raise ValueError(
                f"scales are {self.scales.dtype} {tuple(self.scales.shape)}: expected torch.float32 "
                f"{expected} for blocks of {self.high} x {self.wide}"
            )
        if self.wide < columns and self.wide % FP8_SCALE_COLUMNS:
            raise ValueError(
                f"wide={self.wide}: give a multiple of {FP8_SCALE_COLUMNS}, or all {columns} columns"
            )
        _check_slots_dense(self.values, self.scales)

    @classmethod
    def of_experts(cls, values: Tensor, scale: Tensor) -> StackInFP8:
        """Return a stack with one scale for each slot, as ``fp8_experts.py`` quantises.

        Args:
            values: e4m3 ``[slots, N, K]``.
            scale: fp32 ``[slots]``.
        """
        return cls(values, scale.view(-1, 1, 1), *values.shape[1:])

    @property
    def layout(self) -> Layout:
        """The integers by which a kernel finds the values."""
        slots, outputs, columns = self.values.shape
        return Layout(
            FORMAT_FP8,
            slots,
            outputs,
            columns,
            self.values.stride(0),
            columns,
            1,
            self.scales.stride(0),
            self.scales.shape[2],
            # a kernel's steps are whole blocks, or one block is all columns
            block=-(-min(self.wide, columns) // FP8_SCALE_COLUMNS) * FP8_SCALE_COLUMNS,
            second=min(self.high, outputs),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The bits of the values, and the scales."""
        return [self.values.view(torch.uint8), self.scales]

    def dense(self, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a slot, in fp32."""
        _, outputs, columns = self.values.shape
        scales = self.scales[slot].repeat_interleave(self.high, 0)[:outputs]
        return self.values[slot].float() * scales.repeat_interleave(self.wide, 1)[:, :columns]


@dataclass(frozen=True)
class StackInMXFP4(ExpertStack):
    """Weights in MXFP4 (``mxfp4.py``).

    Attributes:
        codes: uint8 ``[slots, N, K / 2]``, a slot dense.
        scales: uint8 ``[slots, N, K / 32]``, a slot dense.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        codes, scales = self.codes, self.scales
        half = MXFP4_BLOCK // 2
        if codes.ndim != 3 or codes.shape != (*scales.shape[:2], scales.shape[-1] * half):
            raise ValueError(
                f"codes are {tuple(codes.shape)} beside scales {tuple(scales.shape)}: expected "
                "[slots, N, K / 2] beside [slots, N, K / 32]"
            )
        if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ValueError(f"codes are {codes.dtype}, scales {scales.dtype}: give uint8")
        _check_slots_dense(codes, scales)

    @property
    def layout(self) -> Layout:
        """The integers by which a kernel finds the values."""
        slots, outputs, half = self.codes.shape
        return Layout(
            FORMAT_MXFP4,
            slots,
            outputs,
            2 * half,
            self.codes.stride(0),
            half,
            scale_slot=self.scales.stride(0),
            scale_row=self.scales.shape[2],
            block=MXFP4_BLOCK,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Codes and scales."""
        return [self.codes, self.scales]

    def dense(self, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a slot, rounded to ``dtype``."""
        shape = self.codes.shape[1], 2 * self.codes.shape[2]
        return dequantize_mxfp4_reference(
            self.codes[slot].contiguous(), self.scales[slot].contiguous(), shape, dtype
        )


@dataclass(frozen=True)
class StackIn4Bits(ExpertStack):
    """Weights in NF4 or FP4 in bitsandbytes' format (``nf4.py``); K is whole blocks.

    Attributes:
        packed: uint8 ``[slots, N · K / 2]``, a slot dense.
        scales: ``absmax`` is ``[slots, N · K / block]``, a slot dense. Of nested scales ``absmax2``
            is ``[slots, blocks / block2]``, or flat if it goes on from slot to slot, as that of a
            matrix ``[slots · N, K]``; ``code2`` and ``offset`` are those of all slots.
        outputs: N.
        block: values that share a scale.
        code: "nf4" or "fp4".
    """

    packed: Tensor
    scales: Scales
    outputs: int
    block: int = 64
    code: str = "nf4"

    def __post_init__(self) -> None:
        if self.packed.ndim != 2 or self.packed.dtype != torch.uint8:
            raise ValueError(
                f"packed is {self.packed.dtype} {tuple(self.packed.shape)}: expected torch.uint8 "
                "[slots, N · K / 2]"
            )
        if self.code not in CODE_VALUES:
            raise ValueError(f"code={self.code!r}: give one of {', '.join(CODE_VALUES)}")
        slots, half = self.packed.shape
        if 2 * half % (self.outputs * self.block):
            raise ValueError(
                f"{2 * half} values a slot are not {self.outputs} rows of whole blocks of "
                f"{self.block}"
            )
        absmax, second = self.scales.absmax, self.scales.absmax2
        blocks = 2 * half // self.block
        if absmax.shape != (slots, blocks):
            raise ValueError(f"absmax is {tuple(absmax.shape)}: expected {(slots, blocks)}")
        if second is not None:
            through = -(-slots * blocks // self.scales.block2)
            of_each = slots, -(-blocks // self.scales.block2)
            if second.shape not in ((through,), of_each):
                raise ValueError(
                    f"absmax2 is {tuple(second.shape)}: expected {of_each}, or {(through,)} if it "
                    "goes on from slot to slot"
                )
        _check_slots_dense(self.packed, absmax, *([] if second is None else [second]))

    @classmethod
    def of_matrix(
        cls, packed: Tensor, scales: Scales, experts: int, outputs: int, block: int, code: str
    ) -> StackIn4Bits:
        """Return the stack of a matrix ``[E · N, K]`` that was quantised as a whole."""
        by_slot = Scales(
            scales.absmax.view(experts, -1),
            scales.absmax2,
            scales.code2,
            scales.offset,
            scales.block2,
        )
        return cls(packed.view(experts, -1), by_slot, outputs, block, code)

    @property
    def columns(self) -> int:
        """The number K of columns."""
        return 2 * self.packed.shape[1] // self.outputs

    @property
    def layout(self) -> Layout:
        """The integers by which a kernel finds the values."""
        slots, half = self.packed.shape
        absmax, second = self.scales.absmax, self.scales.absmax2
        goes_on = second is not None and second.ndim == 1
        return Layout(
            FORMAT_4_BIT,
            slots,
            self.outputs,
            self.columns,
            self.packed.stride(0),
            half // self.outputs,
            scale_slot=absmax.stride(0),
            second_slot=0 if second is None or goes_on else second.stride(0),
            blocks_before=absmax.shape[1] if goes_on else 0,
            block=self.block,
            second=self.scales.block2,
            nested=int(self.scales.nested),
            code=list(CODE_VALUES).index(self.code),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Codes and scales; of nested scales the tensors of ``Scales`` in order."""
        scales = self.scales
        nested = [scales.absmax2, scales.code2, scales.offset]
        return [self.packed, scales.absmax, *(part for part in nested if part is not None)]

    def dense(self, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a slot, rounded to ``dtype``."""
        scales = self.scales
        absmax = scales.absmax[slot]
        if scales.absmax2 is not None and scales.code2 is not None and scales.offset is not None:
            block = torch.arange(len(absmax), device=absmax.device)
            goes_on = scales.absmax2.ndim == 1
            of_slot = scales.absmax2 if goes_on else scales.absmax2[slot]
            first = slot * len(absmax) if goes_on else 0
            second = of_slot[(first + block) // scales.block2]
            absmax = scales.code2[absmax.int()] * second + scales.offset
        shape = self.outputs, self.columns
        plain = Scales(absmax)
        return dequantize_4bit_reference(
            self.packed[slot], plain, shape, dtype, self.block, self.code
        )


@dataclass(frozen=True)
class StackInGGUF(ExpertStack):
    """Weights in the blocks of GGUF files (``gguf_blocks.py``).

    Attributes:
        packed: uint8 ``[slots, N, bytes of a row]``, a slot dense.
        kind: one of ``GGUF_KINDS``.
    """

    packed: Tensor
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in GGUF_KINDS:
            raise ValueError(f"kind={self.kind!r}: give one of {', '.join(GGUF_KINDS)}")
        size = GGUF_KINDS[self.kind][1]
        if self.packed.ndim != 3 or self.packed.dtype != torch.uint8 or self.packed.shape[2] % size:
            raise ValueError(
                f"packed is {self.packed.dtype} {tuple(self.packed.shape)}: expected torch.uint8 "
                f"[slots, N, bytes], {size} bytes for each block of {self.kind}"
            )
        _check_slots_dense(self.packed)

    @property
    def most_tokens(self) -> int:
        """Tokens up to which a product in place is faster than one over dense values."""
        return GGUF_MOST_TOKENS.get(self.kind, MOST_ROWS)

    @property
    def columns(self) -> int:
        """The number K of columns."""
        block, size = GGUF_KINDS[self.kind]
        return self.packed.shape[2] // size * block

    @property
    def layout(self) -> Layout:
        """The integers by which a kernel finds the values."""
        slots, outputs, row = self.packed.shape
        return Layout(
            FORMAT_GGUF,
            slots,
            outputs,
            self.columns,
            self.packed.stride(0),
            row,
            block=GGUF_GROUP_SIZE[self.kind],
            second=list(GGUF_KINDS).index(self.kind),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The blocks."""
        return [self.packed]

    def dense(self, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a slot, rounded to ``dtype``."""
        shape = self.packed.shape[1], self.columns
        return dequantize_gguf_reference(self.packed[slot].contiguous(), shape, dtype, self.kind)


def _check_slots_dense(*tensors: Tensor) -> None:
    """Raise ValueError unless each slot of the tensors, ``[slots, …]``, is dense."""
    for tensor in tensors:
        if tensor.ndim > 1 and len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(
                f"a slot of {tuple(tensor.shape)} has strides {tensor.stride()[1:]}: only slots may "
                "lie apart"
            )
