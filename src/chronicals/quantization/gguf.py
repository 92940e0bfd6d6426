"""A frozen weight in GGUF blocks, dequantised for each product, or inside a product of few rows.

The bytes are those of the file, so adapters are trained on the same numbers that llama.cpp
multiplies by when the file is deployed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.expert_stacks import ExpertStack, StackInGGUF
from chronicals.kernels.gguf_blocks import GGUF_KINDS, dequantize_gguf
from chronicals.kernels.gguf_product import FASTER_ROWS, gguf_product
from chronicals.kernels.nf4_product import multiplies_few_rows
from chronicals.quantization.packed import PackedStorage, PackedWeight
from chronicals.quantization.packed_linear import PackedLinear


class GGUF(PackedStorage):
    """Weights in GGUF blocks; layers that share an input may have different kinds."""

    dense_stays = False
    packed_bytes = max(size / block for block, size in GGUF_KINDS.values())  # of the largest kind


class LinearGGUF(PackedLinear):
    """A linear layer with a weight in GGUF blocks."""


@dataclass(frozen=True)
class Blocks(PackedWeight):
    """The weight of one linear layer in GGUF blocks.

    Attributes:
        codes: uint8 ``[n, bytes of a row]``, whole blocks.
        shape: ``(n, K)`` of the weight.
        dtype: dtype of the dequantised values.
        kind: one of ``GGUF_KINDS``, ggml's name of the type.
    """

    codes: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: str

    base = GGUF
    linear = LinearGGUF
    why_not_saved = "in blocks of GGUF, which no file but that it was loaded from holds"

    @classmethod
    def of(cls, codes: Tensor, kind: str, dtype: torch.dtype) -> Blocks:
        """Return a weight from its rows of blocks, uint8 ``[n, bytes of a row]``.

        Raises:
            ValueError: there is no such kind, or the rows are not whole blocks.
        """
        if kind not in GGUF_KINDS:
            raise ValueError(f"kind={kind!r}: give one of {', '.join(GGUF_KINDS)}")

        block, size = GGUF_KINDS[kind]
        rows, length = codes.shape
        if codes.dtype != torch.uint8 or length % size:
            raise ValueError(
                f"rows of {length} elements of {codes.dtype} are no blocks of {kind}: give uint8, "
                f"{size} a block"
            )

        return cls(codes, (rows, length // size * block), dtype, kind)

    @property
    def options(self) -> tuple[str, ...]:
        """The kind."""
        return (self.kind,)

    def into(self, out: Tensor) -> Tensor:
        """Write the dequantised values to ``out``, and return it."""
        return dequantize_gguf(self.codes, out, self.kind)

    def reads_dense(self, x: Tensor) -> bool:
        """Return whether the product with x reads the dense values; a faster one of few rows does not."""
        block, _ = GGUF_KINDS[self.kind]
        is_faster = x.numel() <= FASTER_ROWS.get(self.kind, 0) * x.shape[-1]
        return x.dtype != self.dtype or not is_faster or not multiplies_few_rows(x, block)

    def is_faster_dense(self, x: Tensor) -> bool:
        """Return True: a dense copy is read by whole words, blocks byte by byte."""
        return True

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x Wᵀ``."""
        if self.reads_dense(x):
            return super().product(x, dtype)
        return gguf_product(x, self.codes, self.shape[0], self.kind, dtype)

    def expert_stack(self, experts: int) -> ExpertStack:
        """Return the experts' weights as they are."""
        rows = self.shape[0] // experts
        return StackInGGUF(self.codes.view(experts, rows, -1), self.kind)

    @property
    def why_whole(self) -> str:  # type: ignore[override]
        """Reason why rows are never divided among ranks."""
        return f"weights in {self.label} stay as they are in their file, whole"

    @property
    def label(self) -> str:
        """Name of the format for logs."""
        return f"{self.kind} of GGUF"
