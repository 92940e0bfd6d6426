"""Which weights of experts are trained: those of all experts of a layer are one tensor, adapted
where it is named.
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
        path: in the model without adapters, ``model.layers.0.mlp.experts.down_proj``.
        experts: how many.
        values: how many numbers it stands for.
        trained: the weight itself and the matrices of its adapters, ours or PEFT's, as far as they
            require a gradient, and which each is: ``""``, ``"A"`` or ``"B"``.
    """

    path: str
    experts: int
    values: int
    trained: tuple[tuple[nn.Parameter, str], ...]


def stacked_weights(model: Any) -> list[StackedWeight]:
    """The weights of a model's experts that are one parameter of a layer; none of what reads
    images.
    """
    text = within_adapters(model)
    found = []
    for path, outer, inner in _experts_of_text(text):
        adapters = _adapters_around(outer)
        for name, parameter in stacked(inner):
            shape = packed_shapes(inner).get(name, parameter.shape)
            own = [(parameter, "")] if parameter.requires_grad else []
            trained = (*own, *adapters.get(name, ()))
            found.append(
                StackedWeight(f"{path}.{name}", shape[0], torch.Size(shape).numel(), trained)
            )
    return found


def report_frozen_experts(model: Any) -> None:
    """Warn about experts that are not trained, each of their weights by name, with its ratio of all
    weights: those without adapters (ours or PEFT's) beside adapters, or frozen ones where there are
    none.

    What reads images has none, but may have 3-D parameters.
    """
    text = within_adapters(model)
    alike = defaultdict[str, list[tuple[str, int]]](list)
    for weight in stacked_weights(model):
        if not weight.trained:
            alike[_numbered(weight.path)].append((weight.path, weight.values))
    for path, _, inner in _experts_of_text(text):
        if not stacked(inner) and not any(
            parameter.requires_grad for parameter in inner.parameters()
        ):
            alike[_numbered(path)].append((path, count_values(inner)))
    adapted = hasattr(model, "chronicals_lora") or bool(getattr(model, "peft_config", None))
    for found in alike.values():
        path = found[0][0]
        ratio = sum(values for _, values in found) / count_values(model)
        layers = (
            f" (layers {_ranges([int(NUMBER.findall(path)[0]) for path, _ in found])})"
            if len(found) > 1
            else ""
        )
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
"""Of a layer, in a path."""


def _numbered(path: str) -> str:
    """The same for all layers."""
    return NUMBER.sub("*", path, count=1)


def _ranges(numbers: list[int]) -> str:
    """``0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _experts_of_text(text: Any) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Path, and the module with adapters around it and without, of the experts of each layer."""
    if hasattr(text, "config") and not speaks_of_experts(text.config):
        return
    paths = beside_text(text) if hasattr(text, "get_decoder") else []
    towers = {text.get_submodule(path) for path in paths if not _is_parameter(text, path)}
    beside = {module for tower in towers for module in tower.modules()}
    for path, outer in _experts(text):
        if outer not in beside:
            inner: Any = outer
            while hasattr(inner, "base_layer"):
                inner = inner.base_layer
            yield path, outer, inner


def _adapters_around(outer: Any) -> dict[str, list[tuple[nn.Parameter, str]]]:
    """The matrices of adapters that are trained, by the name of the weight that they adapt, and
    which each is.
    """
    found = defaultdict[str, list[tuple[nn.Parameter, str]]](list)
    while hasattr(outer, "base_layer"):
        for path, parameter in outer.named_parameters():
            side = SIDES.get(path.partition(".")[0])
            if side is not None and parameter.requires_grad and hasattr(outer, "parameter_name"):
                found[outer.parameter_name].append((parameter, side))
        outer = outer.base_layer
    return found


SIDES = {"lora_A": "A", "lora_B": "B"}


def _is_parameter(model: Any, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in model.get_submodule(owner)._parameters


def _experts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold the experts of a layer: with 3-D parameters, or named ``experts``;
    adapters around them included.
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
    """Its parameters with 3 dimensions, but those of convolutions; the codes of packed ones."""
    packed = packed_shapes(module)
    if packed:
        return [(name, module.get_parameter(name)) for name in packed]
    own = [] if isinstance(module, _ConvNd) else list(module.named_parameters(recurse=False))
    return [(name, parameter) for name, parameter in own if parameter.ndim == 3]
