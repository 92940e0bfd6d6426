"""Find the stacked weights of experts and report those that are not trained. The weights of all
experts of a layer are one tensor, which is adapted if it is named.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from chronicals.models import beside_text, count_values, speaks_of_experts
from chronicals.models.peft_kinds import within_adapters
from chronicals.quantization import packed_shapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StackedWeight:
    """A weight of all experts of a layer.

    Attributes:
        path: path in the model without adapters, ``model.layers.0.mlp.experts.down_proj``.
        experts: number of experts.
        values: number of values, dequantised.
        trained: the weight and the matrices of its adapters, ours or PEFT's, that require a
            gradient; each with its kind: ``""``, ``"A"`` or ``"B"``.
    """

    path: str
    experts: int
    values: int
    trained: tuple[tuple[nn.Parameter, str], ...]


def stacked_weights(model: Any) -> list[StackedWeight]:
    """Return the stacked weights of a model's experts, without those of modules that read images."""
    text = within_adapters(model)
    weights = []
    for path, outer, inner in _experts_of_text(text):
        adapters = _adapters_around(outer)
        for name, parameter in stacked(inner):
            shape = packed_shapes(inner).get(name, parameter.shape)
            trained = list(adapters.get(name, ()))
            if parameter.requires_grad:
                trained.insert(0, (parameter, ""))
            values = torch.Size(shape).numel()
            weights.append(StackedWeight(f"{path}.{name}", shape[0], values, tuple(trained)))
    return weights


def report_frozen_experts(model: Any) -> None:
    """Warn of experts that are not trained, with their share of all weights.

    In a model with adapters, ours or PEFT's, these are experts without one; in other models frozen
    experts. Modules that read images have no experts, but may have 3-D parameters.
    """
    text = within_adapters(model)
    by_name = defaultdict[str, list[tuple[str, int]]](list)  # path and values of each layer
    for weight in stacked_weights(model):
        if not weight.trained:
            by_name[_without_number(weight.path)].append((weight.path, weight.values))
    for path, _, inner in _experts_of_text(text):
        if not stacked(inner) and not any(
            parameter.requires_grad for parameter in inner.parameters()
        ):
            by_name[_without_number(path)].append((path, count_values(inner)))
    adapted = hasattr(model, "chronicals_lora") or bool(getattr(model, "peft_config", None))
    for frozen in by_name.values():
        path = frozen[0][0]
        ratio = sum(values for _, values in frozen) / count_values(model)
        layers = ""
        if len(frozen) > 1:
            numbers = [int(NUMBER.findall(layer)[0]) for layer, _ in frozen]
            layers = f" (layers {_ranges(numbers)})"
        name = path.rpartition(".")[2]
        if adapted:
            remedy = f"; lora_target_parameters={name} adapts them" if name != "experts" else ""
            logger.warning(WITHOUT_ADAPTERS, path, layers, 100 * ratio, remedy)
        else:
            logger.warning(FROZEN, path, layers, 100 * ratio)


WITHOUT_ADAPTERS = "experts have no adapters and stay frozen: %s%s, %.0f%% of all weights%s"
FROZEN = (
    "experts are frozen and not trained: %s%s, %.0f%% of all weights; requires_grad_(True) "
    "of the parameter trains them"
)


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer in a path."""


def _without_number(path: str) -> str:
    """Return a path that is the same for all layers."""
    return NUMBER.sub("*", path, count=1)


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _experts_of_text(text: Any) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the path of the experts of each layer, and the module with and without adapters around
    it.
    """
    if hasattr(text, "config") and not speaks_of_experts(text.config):
        return
    paths = beside_text(text) if hasattr(text, "get_decoder") else []
    tower_modules: set[nn.Module] = set()
    for path in paths:
        owner, _, name = path.rpartition(".")
        if name not in text.get_submodule(owner)._parameters:
            tower_modules.update(text.get_submodule(path).modules())
    for path, outer in _experts(text):
        if outer not in tower_modules:
            inner: Any = outer
            while hasattr(inner, "base_layer"):
                inner = inner.base_layer
            yield path, outer, inner


def _adapters_around(outer: Any) -> dict[str, list[tuple[nn.Parameter, str]]]:
    """Return the trained matrices of adapters, each with its kind, by the name of the weight that
    they adapt.
    """
    matrices = defaultdict[str, list[tuple[nn.Parameter, str]]](list)
    while hasattr(outer, "base_layer"):
        for path, parameter in outer.named_parameters():
            side = SIDES.get(path.partition(".")[0])
            if side is not None and parameter.requires_grad and hasattr(outer, "parameter_name"):
                matrices[outer.parameter_name].append((parameter, side))
        outer = outer.base_layer
    return matrices


SIDES = {"lora_A": "A", "lora_B": "B"}
"""Kinds of matrices by the names of parameters."""


def _experts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the experts of each layer, with adapters around them. They have 3-D
    parameters or the name ``experts``.
    """
    inner: Any = module
    while hasattr(inner, "base_layer"):
        inner = inner.base_layer
    if stacked(inner) or path.rpartition(".")[2] == "experts":
        yield path, module
        return
    for name, child in module.named_children():
        yield from _experts(child, f"{path}.{name}" if path else name)


def stacked(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module with 3 dimensions, except those of convolutions; for
    packed experts their codes.
    """
    packed = packed_shapes(module)
    if packed:
        return [(name, module.get_parameter(name)) for name in packed]
    if isinstance(module, _ConvNd):
        return []
    parameters = module.named_parameters(recurse=False)
    return [(name, parameter) for name, parameter in parameters if parameter.ndim == 3]
