"""Experts that adapters leave frozen: they are one tensor for all of a layer, not linear layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

logger = logging.getLogger(__name__)


def report_frozen_experts(model: Any) -> None:
    """Warn, by name and share of the weights, where adapters (ours or PEFT's) leave experts as they are."""
    frozen = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in _experts(model)
        if not any(parameter.requires_grad for parameter in module.parameters())
    }
    if frozen:
        share = sum(frozen.values()) / sum(parameter.numel() for parameter in model.parameters())
        others = f" and {len(frozen) - 1} others" if len(frozen) > 1 else ""
        message = "experts have no adapters and stay frozen: %s%s, %.0f%% of all weights"
        logger.warning(message, min(frozen), others, 100 * share)


def _experts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold the experts of a layer: as tensors of three dimensions, or as a list of that name."""
    stacked = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)) and not isinstance(module, _ConvNd)
    if stacked or path.rpartition(".")[2] == "experts":
        yield path, module
        return
    for name, child in module.named_children():
        yield from _experts(child, f"{path}.{name}" if path else name)
