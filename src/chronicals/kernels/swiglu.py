"""SwiGLU (Shazeer, 2020, equation 6) without its products: ``silu(gate) · up``, elementwise on ``[..., F]``."""

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` for two tensors of one shape and type; differentiable in both.

    Raises:
        ValueError: shapes or types differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {tuple(gate.shape)} {gate.dtype}, up is {tuple(up.shape)} {up.dtype}: they must be alike")
    return swiglu_reference(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
