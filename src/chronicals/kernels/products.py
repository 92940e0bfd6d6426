"""Matrix products that sum in fp32 and round once, on a card and on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, kind: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return ``scale · left @ right``, ``[M, N]`` of dtype ``kind``.

    The sum is fp32 and is rounded once, to ``kind``. A card can only write its operands' dtype or
    fp32; any other ``kind`` is cast from the operands' dtype.
    """
    if not left.is_cuda:
        wide = torch.promote_types(left.dtype, torch.float32)
        return torch.mm(left.to(wide), right.to(wide)).mul_(scale).to(kind)
    options: dict[str, Any] = (
        {"out_dtype": kind} if left.dtype != kind and kind == torch.float32 else {}
    )
    if scale == 1.0:
        return torch.mm(left, right, **options).to(kind)
    out = left.new_empty(
        (left.shape[0], right.shape[1]), dtype=options.get("out_dtype", left.dtype)
    )
    return torch.addmm(out, left, right, **options, beta=0, alpha=scale, out=out).to(kind)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``left @ right`` into ``out``, whose rows may be strided."""
    if left.is_cuda:
        torch.mm(left, right, out=out)
    else:
        out.copy_(product(left, right, out.dtype))
