"""Experts without adapters: all experts of a layer are one tensor, not linear layers, and are adapted where they are named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from chronicals.models import beside_text, count_values
from chronicals.models.peft_kinds import within_adapters
from chronicals.quantization import Experts4bit

logger = logging.getLogger(__name__)


def report_frozen_experts(model: Any) -> None:
    """Warn about experts that have no adapters (ours or PEFT's), with their ratio of all weights.

    What reads images has none, but may have 3-D parameters.
    """
    text = within_adapters(model)
    paths = beside_text(text) if hasattr(text, "get_decoder") else []
    towers = {text.get_submodule(path) for path in paths if not _is_parameter(text, path)}
    beside = {module for tower in towers for module in tower.modules()}
    frozen = {
        path: count_values(module)
        for path, module in _experts(model)
        if module not in beside and not any(parameter.requires_grad for parameter in module.parameters())
    }
    if frozen:
        ratio = sum(frozen.values()) / count_values(model)
        others = f" and {len(frozen) - 1} others" if len(frozen) > 1 else ""
        message = "experts have no adapters and stay frozen: %s%s, %.0f%% of all weights%s"
        names = sorted({name for path in frozen for name, _ in stacked(model.get_submodule(path))})
        remedy = f"; lora_target_parameters={','.join(names)} adapts them" if names else ""
        logger.warning(message, min(frozen), others, 100 * ratio, remedy)


def _is_parameter(model: Any, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in model.get_submodule(owner)._parameters


def _experts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold the experts of a layer: with 3-D parameters, or named ``experts``; adapters around them included."""
    inner: Any = module
    while hasattr(inner, "base_layer"):
        inner = inner.base_layer
    if stacked(inner) or path.rpartition(".")[2] == "experts":
        yield path, module
        return
    for name, child in module.named_children():
        yield from _experts(child, f"{path}.{name}" if path else name)


def stacked(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Its parameters with 3 dimensions, but those of convolutions; the codes of those in 4 bits."""
    if isinstance(module, Experts4bit):
        return [(name, module.get_parameter(name)) for name in module.stacked]
    own = [] if isinstance(module, _ConvNd) else list(module.named_parameters(recurse=False))
    return [(name, parameter) for name, parameter in own if parameter.ndim == 3]
