"""The experts of a layer with adapters, as transformers 5 defines experts
(``use_experts_implementation``), in plain torch.

    y_t = Σ_k p_tk · down_e(gate(up_e(x_t))),   e = expert k of token t;   up and down: x W[e]ᵀ + b[e] + s · (x A[e]ᵀ) B[e]ᵀ

Rows are sorted by expert and multiplied group by group. Nothing of the size of W is made: the
gradients of A and B come from products as wide as the rank, W is frozen and has none.

Shapes: T tokens, k experts of a token, S = T · k rows, E experts, K inputs, N outputs, R rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.model_shape import EXPERT_FIELDS
from chronicals.versions import EXPERTS_SAY_PARALLEL, transformers_before

FLAGS = ("has_gate", "has_bias", "is_transposed", "num_experts")
"""Attributes that ``use_experts_implementation`` sets on a class; they tell how experts are
computed from the parameters. Newer versions also set ``has_post_expert_norm``.
"""

TAKES_FACTORS = "takes_factors"
"""Attribute of a function that replaces a layer's forward and accepts the factors of its adapters
as ``factors``; it returns None if it cannot compute them.
"""

ROW_ALIGNMENT = 8
"""Rows of a grouped product must begin at multiples of 16 bytes, 8 elements of 16 bits."""


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
    """Return the inputs of a layer whose experts can be computed here; None if the layer is
    something else, has hooks or another forward, or has its experts on several ranks.

    Args:
        layer: the layer without adapters around it.
        names: the adapted parameters by name.
        inputs, named: arguments of the layer's forward.
    """
    if not all(hasattr(layer, flag) for flag in FLAGS) or is_parallel(layer):
        return None
    does_more = has_hooks(layer) or ("forward" in vars(layer) and not takes_factors(layer))
    if does_more or not names.keys() <= {_first_weight(layer), "down_proj"}:
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


def _first_weight(layer: Any) -> str:
    """Return the name of the weight of the first product."""
    return "gate_up_proj" if layer.has_gate else "up_proj"


def adapted_experts(
    layer: Any,
    factors: Mapping[str, Factors],
    routed: Routed,
    stacks: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the output of the layer with its adapters, ``[T, N]``, in the dtype of the hidden
    states.

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
    rows_SN = _adapted_product(layer, _first_weight(layer), weights, factors, rows_SK, groups)
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
    y_SN = grouped_product(x_SK, weight_EKN, groups.ends_E)
    if layer.has_bias:
        y_SN = y_SN + weights[f"{name}_bias"][groups.experts_S]
    if name not in factors:
        return y_SN
    down_ERK, up_ENR, scale = factors[name]
    down_SR = grouped_product(x_SK, down_ERK.transpose(1, 2), groups.ends_E)
    up_SN = grouped_product(down_SR, up_ENR.transpose(1, 2), groups.ends_E)
    return torch.add(y_SN, up_SN.to(y_SN.dtype), alpha=scale)


def grouped_product(x_SK: Tensor, w_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows of x times a weight for each group, ``[S, N]``: those before ``ends_E[0]`` times
    ``w_EKN[0]``, the next before ``ends_E[1]`` times ``w_EKN[1]``, and so on.

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
