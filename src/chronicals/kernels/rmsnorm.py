"""RMSNorm (Zhang and Sennrich, 2019, equation 4): ``y = x / sqrt(mean(x²) + eps) · weight`` over the last dimension.

``x`` is ``[..., D]`` in fp32, bf16 or fp16, ``weight`` ``[D]``; the mean and the scaling are taken in fp32 and rounded
once, as transformers does: normalised value to the type of x first, then times the weight.
"""

import torch
from torch import Tensor


def fused_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of ``x`` ``[..., D]`` with ``weight`` ``[D]``; differentiable in both.

    Raises:
        ValueError: ``weight`` is not of the width of ``x``.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}: weight must be [{x.shape[-1]}]")
    return rmsnorm_reference(x, weight, eps)


def rmsnorm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)
