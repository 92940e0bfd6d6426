"""Matrix products that are summed in fp32 and rounded once, wherever they are made."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, kind: torch.dtype) -> Tensor:
    """``left @ right`` in ``kind``, rounded to a narrower type only where the device cannot do otherwise."""
    if not left.is_cuda:
        wide = torch.promote_types(left.dtype, torch.float32)
        return torch.mm(left.to(wide), right.to(wide)).to(kind)
    if left.dtype != kind and kind == torch.float32:
        return torch.mm(left, right, out_dtype=kind)
    return torch.mm(left, right).to(kind)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out = left @ right``; ``out`` may have strided rows."""
    if left.is_cuda:
        torch.mm(left, right, out=out)
    else:
        out.copy_(product(left, right, out.dtype))
