"""A frozen 16- or 32-bit weight with the interface of ``PackedWeight``.

It is for code that takes any weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from chronicals.quantization.packed import PackedWeight
from chronicals.quantization.packed_linear import packed_weight


@dataclass(frozen=True)
class PlainWeight(PackedWeight):
    """The weight of a plain linear layer.

    Attributes:
        codes: the weight itself, ``[n, K]``.
    """

    codes: Tensor

    label = "16 or 32 bit"
    why_not_saved = None

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """``(n, K)``."""
        return len(self.codes), self.codes.shape[1]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the weight."""
        return self.codes.dtype

    @classmethod
    def of_tensors(
        cls,
        options: tuple[str, ...],
        tensors: Sequence[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Self:
        """Return the weight in this shape and dtype."""
        (weight,) = tensors
        return cls(weight.view(shape).to(dtype))

    def into(self, out: Tensor) -> Tensor:
        """Copy the weight to ``out``, and return it."""
        return out.copy_(self.codes)

    def dense(self) -> Tensor:
        """Return the weight itself."""
        return self.codes


def frozen_weight(layer: nn.Module, dtype: torch.dtype | None = None) -> PackedWeight | None:
    """Return the weight of a plain or packed linear layer; None for any other module.

    Args:
        layer: any module.
        dtype: dtype to which a weight that is not packed is cast.
    """
    if type(layer) is nn.Linear:
        weight = layer.weight.detach()
        return PlainWeight(weight if dtype is None else weight.to(dtype))
    packed = packed_weight(layer)
    return None if packed is None else packed.detached()
