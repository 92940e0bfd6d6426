"""LoRALinear: a frozen linear layer with an adapter beside it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig


class LoRALinear(nn.Module):
    """``base(x) + s · B (A dropout(x))`` with A ``[r, in]``, B ``[out, r]``, both fp32 whatever the base is.

    A starts uniform as a linear layer does and B at zero, so that the model is at first unchanged.

    Args:
        base_layer: a linear layer whose output is ``[..., out]``; it is frozen.
        config: rank, scale and dropout.
        in_features, out_features: of the base layer.
    """

    def __init__(self, base_layer: nn.Module, config: LoRAConfig, in_features: int, out_features: int):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        device = next(base_layer.parameters()).device
        self.lora_A = nn.Parameter(torch.empty(config.rank, in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(out_features, config.rank, device=device, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale, self.dropout = config.scale, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer(x)
        down = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A.to(x.dtype))
        return base + F.linear(down, self.lora_B.to(x.dtype)).to(base.dtype) * self.scale
