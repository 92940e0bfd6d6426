"""A frozen weight in MXFP4, the format of gpt-oss's experts: 0.53 bytes per value.

It is dequantised for each product, or inside a product of few tokens. Files hold the experts of a
layer ``name`` as these tensors, with E experts of ``[N, K]`` each; the class in transformers has
``[E, K, N]``:

    name_blocks    uint8 [E, N, K / 32, 16]     two codes per byte
    name_scales    uint8 [E, N, K / 32]         exponents, E8M0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from chronicals.kernels.expert_stacks import ExpertStack, StackInMXFP4
from chronicals.kernels.mxfp4 import (
    MXFP4_BLOCK,
    dequantize_mxfp4,
    dequantize_mxfp4_reference,
)
from chronicals.quantization.packed import PackedWeight


@dataclass(frozen=True)
class MXFP4(PackedWeight):
    """One or several weights in MXFP4, one below the other.

    Attributes:
        codes: uint8, ``n · K / 2`` bytes.
        scales: uint8, ``n · K / 32`` bytes.
        shape: ``(n, K)``.
        dtype: dtype of the dequantised values.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype

    PARTS: ClassVar[tuple[str, ...]] = ("scales",)
    DIVIDED: ClassVar[tuple[str, ...]] = ("codes", "scales")
    DESCRIBED_BY: ClassVar[tuple[str, Any]] = ("quant_method", "mxfp4")
    STACK_PARTS: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")

    label = f"MXFP4 in blocks of {MXFP4_BLOCK}"

    def into(self, out: Tensor) -> Tensor:
        """Write the dequantised values to ``out``, and return it."""
        return dequantize_mxfp4(self.codes, self.scales, out)

    def expert_stack(self, experts: int) -> ExpertStack:
        """Return the experts' weights as they are."""
        rows = self.shape[0] // experts
        return StackInMXFP4(self.codes.view(experts, rows, -1), self.scales.view(experts, rows, -1))

    def dense_reference(self) -> Tensor:
        """Return the dequantised values in plain torch."""
        return dequantize_mxfp4_reference(self.codes, self.scales, self.shape, self.dtype)

    @classmethod
    def stored_weights(cls, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return by name of each weight the names of its blocks and scales."""
        blocks, scales = cls.STACK_PARTS
        parts: dict[str, tuple[str, ...]] = {}
        for name in names:
            weight = name.removesuffix(blocks)
            if name.endswith(blocks) and weight + scales in names:
                parts[weight] = (weight + blocks, weight + scales)
        return parts

    @classmethod
    def stored_shape(
        cls, name: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape ``[E, K, N]`` of the class, and bfloat16."""
        experts, rows, blocks, _ = shapes[f"{name}_blocks"]
        return (experts, blocks * MXFP4_BLOCK, rows), torch.bfloat16

    @classmethod
    def read(cls, name: str, stored: Mapping[str, Tensor]) -> Self:
        """Return the weight ``[E · N, K]`` of the tensors, sharing their memory."""
        codes, scales = (stored[name + part] for part in cls.STACK_PARTS)

        for part, tensor in zip(cls.STACK_PARTS, (codes, scales)):
            if tensor.dtype != torch.uint8:
                raise ValueError(
                    f"{name}{part}: is {tensor.dtype}, not torch.uint8; download it again"
                )
        if codes.ndim != 4 or codes.shape[3] != MXFP4_BLOCK // 2 or scales.shape != codes.shape[:3]:
            raise ValueError(
                f"{name}_blocks: is {list(codes.shape)} beside scales {list(scales.shape)}, not "
                "[experts, rows, blocks, 16] beside [experts, rows, blocks]; download it again"
            )

        # The experts lie one below the other, as the rows of one matrix.
        experts, rows, blocks, _ = codes.shape
        shape = experts * rows, blocks * MXFP4_BLOCK
        return cls(codes.reshape(-1), scales.reshape(-1), shape, torch.bfloat16)

    @classmethod
    def read_dense(cls, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the dense weight, fp32 ``[E, K, N]``."""
        experts = stored[f"{name}_blocks"].shape[0]
        matrix = cls.read(name, stored).to(torch.float32).dense()
        return matrix.view(experts, -1, matrix.shape[1]).transpose(1, 2).contiguous()
