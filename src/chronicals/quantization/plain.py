"""A frozen 16- or 32-bit weight with the interface of ``PackedWeight``, for code that takes any
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

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

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return len(self.codes), self.codes.shape[1]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.codes.dtype

    @property
    def options(self) -> tuple[str, ...]:
        return ()

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"codes": self.codes}

    @classmethod
    def of_tensors(
        cls,
        options: tuple[str, ...],
        tensors: Sequence[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Self:
        (weight,) = tensors
        return cls(weight.view(shape).to(dtype))

    def with_divided(self, divided: Any, dtype: torch.dtype) -> Self:
        # Not cast: ``into`` casts as it copies.
        return type(self)(divided["codes"].view(self.shape))

    def into(self, out: Tensor) -> Tensor:
        return out.copy_(self.codes)

    def dense(self) -> Tensor:
        return self.codes

    @property
    def trained(self) -> bool:
        return self.codes.requires_grad

    @property
    def label(self) -> str:
        return "16 or 32 bit"

    @property
    def why_not_saved(self) -> str | None:
        return None


def frozen_weight(layer: nn.Module, dtype: torch.dtype | None = None) -> PackedWeight | None:
    """Return the weight of a plain or packed linear layer; None for any other module.

    Args:
        dtype: dtype to which a weight that is not packed is cast.
    """
    if type(layer) is nn.Linear:
        weight = layer.weight.detach()
        return PlainWeight(weight if dtype is None else weight.to(dtype))
    packed = packed_weight(layer)
    return None if packed is None else packed.detached()
