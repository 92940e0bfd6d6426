"""A frozen weight in the blocks of a GGUF file, byte for byte as the file has them; dequantised for
each product.

So adapters are trained over the very numbers that llama.cpp multiplies by when the file is
deployed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chronicals.kernels.gguf_blocks import GGUF_KINDS, dequantize_gguf
from chronicals.quantization.packed import PackedBase


@dataclass(frozen=True)
class Blocks:
    """The weight of one linear layer in blocks of GGUF.

    Attributes:
        codes: uint8 ``[n, bytes of a row]``, whole blocks.
        shape: ``(n, K)`` of the weight.
        dtype: of what it is dequantised to.
        kind: one of ``GGUF_KINDS``, ggml's name of the type.
    """

    codes: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: str

    @classmethod
    def of(cls, codes: Tensor, kind: str, dtype: torch.dtype) -> Blocks:
        """A weight from its rows of blocks, uint8 ``[n, bytes of a row]``.

        Raises:
            ValueError: there is no such kind, or rows are no whole blocks.
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

    @classmethod
    def base(cls, packed: Sequence[Blocks], columns: int = 0, ranks: Sequence[int] = ()) -> GGUF:
        """What multiplies by several of them."""
        return GGUF(packed, columns, ranks)

    def detached(self) -> Blocks:
        """The same, whose codes are no parameter."""
        return replace(self, codes=self.codes.detach())

    def to(self, dtype: torch.dtype) -> Blocks:
        """The same, dequantised to another dtype."""
        return replace(self, dtype=dtype)

    def into(self, out: Tensor) -> Tensor:
        """Write the values to ``out``, ``[n, K]``, rows dense; by one launch."""
        return dequantize_gguf(self.codes, out, self.kind)

    def dense(self) -> Tensor:
        """The values, ``[n, K]``."""
        return self.into(torch.empty(self.shape, dtype=self.dtype, device=self.codes.device))

    @property
    def bytes(self) -> int:
        return self.codes.nbytes


class GGUF(PackedBase):
    """Weights in blocks of GGUF; layers of one input may have different kinds of them."""

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Of the largest kind; the shared buffers are beside it."""
        return max(size / block for block, size in GGUF_KINDS.values())
