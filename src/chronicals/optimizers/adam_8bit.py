"""AdamW with both moments in 8 bits (Dettmers et al., 2022), 2.03 bytes a weight where fp32 takes 8.

Vectors and small matrices keep moments in fp32, as do groups that ask for it: embeddings should, for their gradients differ
most from one row to another (ibid., section 2.3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.adamw_8bit import SIZE, quantize_moment
from chronicals.optimizers.adamw import FusedAdamW

SMALLEST = 4096
"""Weights with fewer elements keep moments in fp32."""


class Adam8bit(FusedAdamW):
    """``FusedAdamW`` whose moments are in 8 bits.

    Args:
        params: tensors or groups; ``"full_moments": True`` in a group keeps those of its weights in fp32.
        options: further arguments of ``FusedAdamW``.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **{"state_dtype": torch.float32, **options})

    def _new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Codes of zeros, ``exp_avg`` and ``exp_avg_sq``, uint8, and their scales, fp32; or moments in fp32."""
        if parameter.ndim < 2 or parameter.numel() < SMALLEST or self._group_of(parameter).get("full_moments"):
            return super()._new_moments(parameter)
        found: dict[str, Tensor] = {}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codes, scales = quantize_moment(torch.zeros(1, device=parameter.device), signed)
            found[name] = torch.full_like(parameter, int(codes), dtype=torch.uint8, memory_format=torch.contiguous_format)
            found[f"{name}_scale"] = scales.new_zeros(-(-parameter.numel() // SIZE))
        return found

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(parameter is own for own in group["params"]))
