"""AdamW with both moments in 8 bits (Dettmers et al., 2022): 2.03 bytes a weight instead of 8.

Vectors and small matrices keep fp32 moments, and so do groups that ask for it. Embeddings should,
since their gradients differ most between rows (ibid., section 2.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.adamw_8bit import MOMENT_BLOCK, quantize_moment
from chronicals.optimizers.adamw import FusedAdamW

MIN_8BIT_ELEMENTS = 4096
"""Weights with fewer elements keep fp32 moments."""


class Adam8bit(FusedAdamW):
    """``FusedAdamW`` whose moments are in 8 bits.

    Args:
        params: tensors or groups; ``"full_moments"`` in a group decides for all its weights
            whether their moments are in fp32.
        options: further arguments of ``FusedAdamW``.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **{"state_dtype": torch.float32, **options})

    def _new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return initial moments: uint8 codes of zero with fp32 scales, or fp32 moments."""
        group = next(
            group
            for group in self.param_groups
            if any(parameter is member for member in group["params"])
        )
        if group.get("full_moments", not _is_large(parameter)):
            return super()._new_moments(parameter)
        states: dict[str, Tensor] = {}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codes, _ = quantize_moment(torch.zeros(1), signed)
            scales = torch.empty(-(-parameter.numel() // MOMENT_BLOCK), device="meta")
            states[name] = self._filled(parameter, parameter, int(codes), torch.uint8)
            states[f"{name}_amax"] = self._filled(parameter, scales, 0)
        return states


def _is_large(parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and parameter.numel() >= MIN_8BIT_ELEMENTS


def keep_full_moments(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each group in two: weights with 8-bit moments, and weights with fp32 moments.

    ``Adam8bit`` keeps fp32 moments of the embeddings and small weights of ``model``.
    """
    narrow = {id(p) for p in moments_in_8_bits(model)}
    halves = []
    for group in groups:
        for full in (False, True):
            halves.append(
                {
                    **group,
                    "params": [p for p in group["params"] if (id(p) not in narrow) == full],
                    "full_moments": full,
                }
            )
    return [group for group in halves if group["params"]]


def moments_in_8_bits(model: nn.Module) -> list[Tensor]:
    """Return the trained weights of ``model`` that have 8-bit moments by ``keep_full_moments``."""
    # Embeddings, with tied heads, adapters of embeddings and trained tokens.
    tables = {
        id(p)
        for name, p in model.named_parameters()
        if "lora_embedding" in name or "lora_tokens" in name
    }
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables |= {id(p) for p in module.parameters(recurse=False)}
    return [
        p for p in model.parameters() if p.requires_grad and _is_large(p) and id(p) not in tables
    ]


def moment_bytes(model: nn.Module, weights: Iterable[Tensor]) -> int:
    """Return the bytes of both moments of some trained weights of ``model``, scales included.

    Their groups must be from ``keep_full_moments``.
    """
    narrow = {id(p) for p in moments_in_8_bits(model)}
    return sum(
        2 * (p.numel() + 4 * -(-p.numel() // MOMENT_BLOCK)) if id(p) in narrow else 8 * p.numel()
        for p in weights
    )
