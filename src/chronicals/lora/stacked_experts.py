"""The experts of a layer whose weights are stacked: found, reported, and computed with adapters.

The weights of all experts of a layer are one tensor, which is adapted if it is named. Layers as
transformers 5 defines them (``use_experts_implementation``) are computed in plain torch:

    y_t = Σ_k p_tk · down_e(gate(up_e(x_t))),   e = expert k of token t;   up and down: x W[e]ᵀ + b[e] + s · (x A[e]ᵀ) B[e]ᵀ

Rows are sorted by expert and multiplied group by group. Nothing of the size of W is made: the
gradients of A and B come from products as wide as the rank, W is frozen and has none.

Shapes: T tokens, k experts of a token, S = T · k rows, E experts, K inputs, N outputs, R rank.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from chronicals.model_shape import EXPERT_FIELDS
from chronicals.models import beside_text, count_values, speaks_of_experts
from chronicals.models.peft_kinds import within_adapters
from chronicals.quantization import packed_shapes
from chronicals.versions import EXPERTS_SAY_PARALLEL, transformers_before

logger = logging.getLogger(__name__)

FLAGS = ("has_gate", "has_bias", "is_transposed", "num_experts")
"""Attributes that ``use_experts_implementation`` sets on a class.

They tell how experts are computed from the parameters. Newer versions also set
``has_post_expert_norm``.
"""

TAKES_FACTORS = "takes_factors"
"""Attribute of a function that replaces a layer's forward and accepts its adapters' ``factors``.

It returns None if it cannot compute them.
"""

ROW_ALIGNMENT = 8
"""Rows of a grouped product must begin at multiples of 16 bytes, 8 elements of 16 bits."""

WITHOUT_ADAPTERS = "experts have no adapters and stay frozen: %s%s, %.0f%% of all weights%s"
FROZEN = (
    "experts are frozen and not trained: %s%s, %.0f%% of all weights; requires_grad_(True) "
    "of the parameter trains them"
)


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer in a path."""


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
    """Return the stacked weights of a model's experts; not those of modules that read images."""
    text = within_adapters(model)
    weights = []
    for path, outer, inner in _experts_of_text(text):
        # the trained matrices of adapters, each with its kind, by the name of their weight
        adapters = defaultdict[str, list[tuple[nn.Parameter, str]]](list)
        wrap: Any = outer
        while hasattr(wrap, "base_layer"):
            for name, parameter in wrap.named_parameters():
                kind = {"lora_A": "A", "lora_B": "B"}.get(name.partition(".")[0])
                if kind and parameter.requires_grad and hasattr(wrap, "parameter_name"):
                    adapters[wrap.parameter_name].append((parameter, kind))
            wrap = wrap.base_layer
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
    # path and values of each layer, by a path that is the same for all layers
    by_name = defaultdict[str, list[tuple[str, int]]](list)
    for weight in stacked_weights(model):
        if not weight.trained:
            by_name[NUMBER.sub("*", weight.path, count=1)].append((weight.path, weight.values))
    for path, _, inner in _experts_of_text(text):
        if not stacked(inner) and not any(
            parameter.requires_grad for parameter in inner.parameters()
        ):
            by_name[NUMBER.sub("*", path, count=1)].append((path, count_values(inner)))
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
    """Yield path and module of the experts of each layer, with and without adapters around it."""
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


def _experts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the experts of each layer, with adapters around them.

    They have 3-D parameters or the name ``experts``.
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
    """Return the 3-D parameters of a module, except those of convolutions.

    For packed experts these are their codes.
    """
    packed = packed_shapes(module)
    if packed:
        return [(name, module.get_parameter(name)) for name in packed]
    if isinstance(module, _ConvNd):
        return []
    parameters = module.named_parameters(recurse=False)
    return [(name, parameter) for name, parameter in parameters if parameter.ndim == 3]


class Factors(NamedTuple):
    """A and B of an adapter for each expert, in the dtype of W, and s."""

    down_ERK: Tensor
    up_ENR: Tensor
    scale: float


class Routed(NamedTuple):
    """The inputs of a layer of experts: hidden states, expert ids and router weights."""

    hidden_TK: Tensor
    experts_Tk: Tensor
    shares_Tk: Tensor


def expert_inputs(
    layer: Any, names: Mapping[str, Any], inputs: tuple, named: Mapping[str, Any]
) -> Routed | None:
    """Return the inputs of a layer whose experts can be computed here; None for any other.

    That is a layer of something else, with hooks or another forward, or with its experts on several
    ranks.

    Args:
        layer: the layer without adapters around it.
        names: the adapted parameters by name.
        inputs: arguments of the layer's forward.
        named: those that are passed by name.
    """
    if not all(hasattr(layer, flag) for flag in FLAGS) or is_parallel(layer):
        return None
    first_weight = "gate_up_proj" if layer.has_gate else "up_proj"
    does_more = has_hooks(layer) or ("forward" in vars(layer) and not takes_factors(layer))
    if does_more or not names.keys() <= {first_weight, "down_proj"}:
        return None
    order = _argument_names(type(layer).forward)
    arguments = dict(zip(order, inputs)) | dict(named)
    if len(order) != 3 or arguments.keys() != set(order):
        return None
    routed = Routed(*(arguments[name] for name in order))
    return routed if all(isinstance(x, Tensor) and x.ndim == 2 for x in routed) else None


def has_hooks(layer: nn.Module) -> bool:
    """Return whether the layer has hooks."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def is_parallel(layer: Any) -> bool:
    """Return whether the experts of a layer are on several ranks.

    Older versions of transformers do not mark such experts. There it is a layer of a model that is
    divided over ranks (``_is_hooked``) with fewer experts than its configuration, which is also
    true of a pruned layer.
    """
    if not transformers_before(EXPERTS_SAY_PARALLEL):
        return bool(getattr(layer, "_is_expert_parallel", False))
    if not getattr(layer, "_is_hooked", False):
        return False
    # down_proj may be a DTensor, whose length counts the experts of all ranks
    count = min(len(layer.down_proj), getattr(layer, "num_experts", len(layer.down_proj)))
    numbers = (getattr(getattr(layer, "config", None), name, None) for name in EXPERT_FIELDS)
    configured = next((number for number in numbers if isinstance(number, int)), count)
    return count != configured


def takes_factors(layer: Any) -> bool:
    """Return whether the function that replaces the layer's forward computes its adapters, too."""
    return hasattr(getattr(vars(layer).get("forward"), "__func__", None), TAKES_FACTORS)


@functools.cache
def _argument_names(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def adapted_experts(
    layer: Any,
    factors: Mapping[str, Factors],
    routed: Routed,
    stacks: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the output of the layer with its adapters, ``[T, N]``.

    It is in the dtype of the hidden states.

    Args:
        layer: the layer without adapters around it.
        factors: the adapters by the names of the weights.
        routed: inputs of the layer.
        stacks: the layer's weights by name, if it has none itself: tensors, or ``Stack``.
    """
    hidden_TK, experts_Tk, shares_Tk = routed
    weights = dict(layer._parameters) if stacks is None else stacks
    if takes_factors(layer):
        weights_of_layer = {} if stacks is None else {"stacks": stacks}
        computed: Tensor | None = layer.forward(*routed, factors=factors, **weights_of_layer)
        if computed is not None:
            return computed
    tokens, each = experts_Tk.shape
    experts_S, order_S = experts_Tk.reshape(-1).sort(stable=True)
    numbers_E = torch.arange(len(layer.down_proj), device=experts_S.device)
    groups = _Groups(experts_S, torch.searchsorted(experts_S, numbers_E, right=True))
    rows_SK = hidden_TK[order_S // each]
    first_weight = "gate_up_proj" if layer.has_gate else "up_proj"
    rows_SN = _adapted_product(layer, first_weight, weights, factors, rows_SK, groups)
    rows_SN = layer._apply_gate(rows_SN) if layer.has_gate else layer.act_fn(rows_SN)
    rows_SN = _adapted_product(layer, "down_proj", weights, factors, rows_SN, groups)
    if getattr(layer, "has_post_expert_norm", False):
        rows_SN = layer.post_expert_norm(rows_SN)
    rows_SN = rows_SN * shares_Tk.reshape(-1)[order_S, None]
    places_S = torch.arange(len(order_S), device=order_S.device)
    back_S = torch.empty_like(order_S).scatter_(0, order_S, places_S)
    return rows_SN[back_S].unflatten(0, (tokens, each)).sum(1).to(hidden_TK.dtype)


class _Groups(NamedTuple):
    """Rows sorted by expert: the expert of each row, and the end of each expert's rows."""

    experts_S: Tensor
    ends_E: Tensor


def _adapted_product(
    layer: Any,
    name: str,
    weights: Mapping[str, Any],
    factors: Mapping[str, Factors],
    x_SK: Tensor,
    groups: _Groups,
) -> Tensor:
    """Return rows times the weight of their expert, with its bias and adapter, ``[S, N]``."""
    weight: Tensor = weights[name] if isinstance(weights[name], Tensor) else weights[name].dense()
    x_SK = x_SK.to(weight.dtype)
    weight_EKN = weight if layer.is_transposed else weight.transpose(1, 2)
    y_SN = product_by_groups(x_SK, weight_EKN, groups.ends_E)
    if layer.has_bias:
        y_SN = y_SN + weights[f"{name}_bias"][groups.experts_S]
    if name not in factors:
        return y_SN
    down_ERK, up_ENR, scale = factors[name]
    down_SR = product_by_groups(x_SK, down_ERK.transpose(1, 2), groups.ends_E)
    up_SN = product_by_groups(down_SR, up_ENR.transpose(1, 2), groups.ends_E)
    return torch.add(y_SN, up_SN.to(y_SN.dtype), alpha=scale)


def product_by_groups(x_SK: Tensor, w_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows of x times a weight for each group, ``[S, N]``.

    The rows before ``ends_E[0]`` are multiplied by ``w_EKN[0]``, the next before ``ends_E[1]`` by
    ``w_EKN[1]``, and so on.

    In bf16 on a card of compute capability 8.0 or newer this is one kernel, and the host does not
    wait for the device. Otherwise each expert with rows has its own product, and the host reads
    their number.
    """
    is_one_kernel = (
        x_SK.is_cuda
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x_SK.device) >= (8, 0)
        and x_SK.dtype == torch.bfloat16
    )
    if is_one_kernel and w_EKN.dtype == x_SK.dtype:
        more_K, more_N = (-size % ROW_ALIGNMENT for size in w_EKN.shape[1:])
        if more_K or more_N:  # a rank that is no multiple of 8
            x_SK = F.pad(x_SK, (0, more_K))
            w_EKN = F.pad(w_EKN, (0, more_N, 0, more_K))
        # One of the two last dimensions must be contiguous; PEFT's B has its experts last.
        if w_EKN.requires_grad or 1 not in w_EKN.stride()[1:]:
            w_EKN = w_EKN.contiguous()
        y_SN: Tensor = F.grouped_mm(x_SK.contiguous(), w_EKN, offs=ends_E.int())
        return y_SN[:, : y_SN.shape[1] - more_N]
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    groups = zip(x_SK.split(counts), w_EKN.unbind(0), strict=True)
    parts = [rows @ weight for rows, weight in groups if len(rows)]
    return torch.cat(parts) if parts else x_SK.new_zeros(0, w_EKN.shape[2])
