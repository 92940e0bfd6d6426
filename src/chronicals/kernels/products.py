"""Matrix products that are rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, kind: torch.dtype) -> Tensor:
    """``left @ right`` in ``kind``, rounded to a narrower type only where the device cannot do otherwise."""
    if left.is_cuda and left.dtype != kind and kind == torch.float32:
        return torch.mm(left, right, out_dtype=kind)
    return torch.mm(left, right).to(kind)
