"""A frozen weight in 4 bits (QLoRA, Dettmers et al., 2023): about half a byte per value.

It is dequantised for each product, or inside a product of few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from chronicals.kernels.expert_stacks import ExpertStack, StackIn4Bits
from chronicals.kernels.nf4 import (
    SCALE_BLOCK,
    Scales,
    dequantize_4bit,
    dequantize_4bit_reference,
    quantize_fp4,
    quantize_nf4,
    quantize_scales,
)
from chronicals.kernels.nf4_product import (
    FASTER_ROWS,
    are_one_launch,
    multiplies_few_rows,
    nf4_product,
    nf4_products,
)
from chronicals.quantization.packed import PackedStorage, PackedWeight
from chronicals.quantization.packed_linear import PackedLinear

BLOCK = 64
"""Number of values that share a scale, as in QLoRA."""

SCALE_TENSORS = ("absmax", "absmax2", "code2", "offset")
"""Names of the tensors next to the codes, as in ``Scales``."""


class NF4(PackedStorage):
    """Weights in bitsandbytes' 4-bit formats."""

    packed: Any

    dense_stays = False
    # A code, and with nested scales a byte per block and four bytes per block of scales.
    packed_bytes = 1 / 2 + 1 / BLOCK + 4 / (BLOCK * SCALE_BLOCK)

    def products(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x Wᵀ``, ``[T, N]``, in one launch if the weights have one form."""
        first = self.packed[0]
        scales = [part.scales for part in self.packed]
        forms = {(part.block, part.code) for part in self.packed}
        if len(forms) > 1 or not are_one_launch(scales):
            return super().products(x, dtype)
        codes = [part.codes for part in self.packed]
        outputs = [part.shape[0] for part in self.packed]
        return nf4_products(x, codes, scales, outputs, first.block, first.code, dtype)


class Linear4bit(PackedLinear):
    """A linear layer with a weight in a 4-bit format of bitsandbytes; its scales stay fp32."""

    absmax: Tensor
    absmax2: Tensor | None
    code2: Tensor | None
    offset: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        """Quantise a plain layer's weight to NF4 in blocks of 64 with nested scales.

        Args:
            linear: the layer.
            device: where it is quantised and stays; by default its current device.
        """
        weight = Packed.of(linear.weight.detach().to(device))
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        return cls(weight, bias).train(linear.training)


@dataclass(frozen=True)
class Packed(PackedWeight):
    """The weight of one linear layer in 4 bits.

    Attributes:
        codes: uint8, two codes per byte, of any shape.
        scales: scales of its blocks.
        shape: ``(n, K)`` of the weight.
        dtype: dtype of the dequantised values.
        block: number of values that share a scale.
        code: "nf4" or "fp4".
        quantized_from: dtype of the weight before quantisation; None if unknown.
    """

    codes: Tensor
    scales: Scales
    shape: tuple[int, int]
    dtype: torch.dtype
    block: int = BLOCK
    code: str = "nf4"
    quantized_from: torch.dtype | None = None

    PARTS: ClassVar[tuple[str, ...]] = SCALE_TENSORS
    DIVIDED: ClassVar[tuple[str, ...]] = ("codes", "absmax", "absmax2")

    DESCRIBED_BY: ClassVar[tuple[str, Any]] = ("load_in_4bit", True)

    base = NF4
    linear = Linear4bit
    why_not_saved = None

    @classmethod
    def of(
        cls, weight: Tensor, block: int = BLOCK, nested: bool = True, code: str = "nf4"
    ) -> Packed:
        """Quantise a weight ``[n, K]``, fp32, bf16 or fp16, to NF4 or FP4.

        Args:
            weight: the weight.
            block: number of values that share a scale.
            nested: if true, the scales are quantised too.
            code: "nf4" or "fp4".
        """
        quantize = quantize_nf4 if code == "nf4" else quantize_fp4
        codes, absmax = quantize(weight, block)
        scales = quantize_scales(absmax) if nested else Scales(absmax)
        rows, columns = weight.shape
        return cls(codes, scales, (rows, columns), weight.dtype, block, code, weight.dtype)

    @property
    def options(self) -> tuple[str, ...]:
        """Code, block, block of the scales, and dtype before quantisation."""
        source = ""
        if self.quantized_from is not None:
            source = str(self.quantized_from).removeprefix("torch.")
        return self.code, str(self.block), str(self.scales.block2), source

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The codes and the tensors of ``scales``."""
        scales = self.scales
        return {
            "codes": self.codes,
            "absmax": scales.absmax,
            "absmax2": scales.absmax2,
            "code2": scales.code2,
            "offset": scales.offset,
        }

    @classmethod
    def of_tensors(
        cls,
        options: tuple[str, ...],
        tensors: Sequence[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Self:
        """Return the weight; without nested scales there are two tensors."""
        code, block, block2, source = options
        codes, absmax, *nested = tensors
        absmax2, code2, offset = nested or (None, None, None)

        scales = Scales(absmax, absmax2, code2, offset, int(block2))
        quantized_from = getattr(torch, source) if source else None
        return cls(codes, scales, shape, dtype, int(block), code, quantized_from)

    def into(self, out: Tensor) -> Tensor:
        """Write the dequantised values to ``out``, and return it."""
        return dequantize_4bit(self.codes, self.scales, out, self.block, self.code)

    def reads_dense(self, x: Tensor) -> bool:
        """Return whether the product with x reads the dense values.

        That of few rows in ``dtype`` does not on a card. The rows alone decide, not whether a
        gradient is wanted: a pass that is recomputed with one gives the same values.
        """
        return x.dtype != self.dtype or not multiplies_few_rows(x, self.block)

    def is_faster_dense(self, x: Tensor) -> bool:
        """Return whether the product with x is faster where a dense copy is at hand."""
        return self.reads_dense(x) or x.numel() > FASTER_ROWS * x.shape[-1]

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x Wᵀ``."""
        if self.reads_dense(x):
            return super().product(x, dtype)
        outputs = self.shape[0]
        return nf4_product(x, self.codes, self.scales, outputs, self.block, self.code, dtype)

    def expert_stack(self, experts: int) -> ExpertStack | None:
        """Return the experts' weights as they are, if rows are whole blocks."""
        rows, columns = self.shape
        if columns % self.block:
            return None
        form = rows // experts, self.block, self.code
        return StackIn4Bits.of_matrix(self.codes, self.scales, experts, *form)

    def dense_reference(self) -> Tensor:
        """Return the dequantised values in plain torch."""
        return dequantize_4bit_reference(
            self.codes, self.scales, self.shape, self.dtype, self.block, self.code
        )

    def divides(self, count: int) -> bool:
        """Return whether ``count`` ranks can have whole scale blocks, and each as many rows.

        A rank then needs no scale of another rank.
        """
        rows, width = self.shape
        whole = self.block * (self.scales.block2 if self.scales.nested else 1)
        return rows % count == 0 and rows // count * width % whole == 0

    def by_expert(self, count: int) -> tuple[Self, dict[str, Tensor]]:
        """Return the tensors of each expert.

        Where a block of nested scales belongs to two experts, they are the plain fp32 scales.
        """
        if self.divides(count) or not self.scales.nested:
            return super().by_expert(count)
        return replace(self, scales=Scales(self.scales.plain())).by_expert(count)

    @property
    def label(self) -> str:
        """Name of the format for logs."""
        return f"{self.code} in blocks of {self.block}"

    @property
    def recipe(self) -> FourBits:  # type: ignore[override]
        """Recipe by which the weight was quantised, as far as known."""
        return FourBits.of(self, self.dtype)

    def stored(self, name: str) -> dict[str, Tensor]:
        """Return the tensors by bitsandbytes' names, which bitsandbytes and transformers read."""
        from chronicals.quantization.bitsandbytes import stored_tensors

        return stored_tensors(name, self)

    def read_stored(self, name: str, stored: Mapping[str, Tensor]) -> Packed:
        """Return the weight of these tensors, which must be of the same shape and format."""
        from chronicals.quantization.bitsandbytes import read_weight

        there = read_weight(name, stored)
        ours, theirs = (
            (x.shape, x.block, x.code, x.scales.nested, x.scales.block2) for x in (self, there)
        )
        if ours != theirs:
            raise ValueError(
                f"the 4-bit weight is {theirs} there and {ours} here: shape, block, format, "
                "nested, its block"
            )
        return there

    @classmethod
    def stored_weights(cls, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return by name of each 4-bit weight the names of its tensors, codes first."""
        from chronicals.quantization.bitsandbytes import ENTRIES, QUANT_STATE

        parts = {}
        for name in names:
            weight, has_state, _ = name.partition(f".{QUANT_STATE}")
            if has_state:
                entries = [f"{weight}.{entry}" for entry in ENTRIES]
                parts[weight] = (weight, *(entry for entry in entries if entry in names))
        return parts

    @classmethod
    def stored_shape(
        cls, name: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype by the JSON tensor."""
        from chronicals.quantization.bitsandbytes import (
            BITSANDBYTES_DTYPES,
            QUANT_STATE,
            read_quant_state,
        )

        part = next(part for part in shapes if f".{QUANT_STATE}" in part)
        state = read_quant_state(part, read(part), code=part.rpartition(QUANT_STATE)[2])
        return tuple(state["shape"]), BITSANDBYTES_DTYPES[state["dtype"]]

    @classmethod
    def read(cls, name: str, stored: Mapping[str, Tensor]) -> Packed:
        """Return a weight from bitsandbytes' tensors, sharing their memory."""
        from chronicals.quantization.bitsandbytes import read_weight

        return read_weight(name, stored)

    def quantization_config(self, model: nn.Module, paths: Collection[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` that transformers writes for such layers."""
        from chronicals.quantization.bitsandbytes import packed_description

        return packed_description(model, paths, self.dtype, self.code, self.scales.nested)


@dataclass(frozen=True)
class FourBits:
    """Recipe of a 4-bit quantisation; the same weight gets the same codes by it.

    Attributes:
        code: ``nf4`` or ``fp4``.
        block: number of values that share a scale.
        scale_block: number of scales that share a scale of their own; None if they are not
            quantised.
        quantized_from: dtype of the weight before quantisation; None if unknown.
        products: dtype to which it is dequantised.
    """

    code: str = "nf4"
    block: int = BLOCK
    scale_block: int | None = 256
    quantized_from: str | None = None
    products: str = "float32"

    @classmethod
    def of(cls, weight: Packed, products: torch.dtype) -> FourBits:
        """Return the recipe of ``weight``, of which this process may hold only a part."""
        source = None
        if weight.quantized_from is not None:
            source = str(weight.quantized_from).removeprefix("torch.")
        scale_block = weight.scales.block2 if weight.scales.nested else None
        read_in = str(products).removeprefix("torch.")
        return cls(weight.code, weight.block, scale_block, source, read_in)

    def quantise(self, weight: Tensor) -> Packed:
        """Return ``weight``, ``[n, K]``, quantised from the dtype ``quantized_from``."""
        if self.quantized_from is not None:
            weight = weight.to(getattr(torch, self.quantized_from))
        return Packed.of(weight, self.block, self.scale_block is not None, self.code)

    def values(self, weight: Tensor) -> Tensor:
        """Return the dequantised values of the weight after quantisation, fp32."""
        read_in = getattr(torch, self.products)
        return self.quantise(weight).to(read_in).dense().float()

    def same_codes(self, other: FourBits) -> bool:
        """Return whether both recipes give a weight the same codes, as far as known."""
        sources = {self.quantized_from, other.quantized_from} - {None}
        if len(sources) > 1:
            return False

        # Neither the dtype of the products nor an unknown source changes the codes.
        ours = replace(self, products="", quantized_from="")
        return ours == replace(other, products="", quantized_from="")

    def __str__(self) -> str:
        nested = "" if self.scale_block is None else f" with scales in blocks of {self.scale_block}"
        return f"{self.code.upper()} in blocks of {self.block}{nested}"


RECIPES: dict[str, FourBits] = {"nf4": FourBits()}
"""Recipes by the values of ``ChronicalsConfig.quantization``."""
