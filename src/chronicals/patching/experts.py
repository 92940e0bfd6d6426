"""Run the experts of a layer, as transformers 5 defines them, by grouped products.

The products are those of ``kernels/fused_experts.py``. Recognised is a module with transformers'
description of its experts (``use_experts_implementation``), a gate, two 3-D parameters (transposed
or not, with biases or without) and a unit of ``recognise_experts``. The proof compares outputs and
the gradients of the input, of the router's shares and of the parameters. The router stays the
class's own. The class's own forward runs under autocast, with experts on several ranks, and for
weights of a dtype that no product takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.expert_glu import GATE_ACTIVATIONS, Gate
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.kernels.streamed_experts import Adapter
from chronicals.log_once import log_once
from chronicals.lora.stacked_experts import FLAGS, TAKES_FACTORS, Factors, is_parallel
from chronicals.moe.offload.module import source_of
from chronicals.patching.forms import Form, is_proved, random_numbers
from chronicals.patching.fp8_experts import IN_FP8
from chronicals.patching.gated_mlps import Uncalled
from chronicals.quantization import FP8Experts
from chronicals.quantization.experts import TAKES_STACKS, as_class

logger = logging.getLogger(__name__)

FUSED_EXPERTS = "fused experts"

GateOf = Callable[[Any], Gate]
"""Reads the unit of a module. Its numbers may differ from those of the module that was proved."""

NUMBERS = (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit"))
"""Attributes in which classes store the numbers of a clamped unit."""

_PRODUCTS = ("gate_up_proj", "down_proj")
OTHERWISE = "has adapters beside products of its class, which look for its weights on the card"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _gate_of(
    activation: str, alpha: str | None, limit: str | None, interleaved: bool, module: Any
) -> Gate:
    """Return the unit of a module, whose numbers are in the attributes ``alpha`` and ``limit``."""
    if limit is None:
        return Gate(activation, interleaved=interleaved)
    if alpha is None:
        return Gate(activation, limit=getattr(module, limit), interleaved=interleaved)
    return Gate(activation, getattr(module, alpha), getattr(module, limit), 1.0, interleaved)


def recognise_experts(module: nn.Module) -> Form | None:
    """Return the form of a module of a twin; None if it has no experts that are computed so."""
    described = all(hasattr(module, flag) for flag in FLAGS) and hasattr(module, "is_concatenated")
    if (
        not described
        or not getattr(module, "has_gate", False)
        or getattr(module, "has_post_expert_norm", False)
    ):
        return None
    names = set(_PRODUCTS)
    if getattr(module, "has_bias", False):
        names.update(f"{name}_bias" for name in _PRODUCTS)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if (
        parameters.keys() != names
        or any(parameters[name].ndim != 3 for name in _PRODUCTS)
        or module._buffers
    ):
        return None
    uncalled = Uncalled(module, module._modules)
    count, *sizes = parameters["down_proj"].shape
    width = sizes[module.is_transposed is True]
    class_forward = partial(_routed, type(module).forward, count)
    units: list[GateOf] = []
    # the likelier order of gate and up first
    concatenated = bool(module.is_concatenated)
    for interleaved in (not concatenated, concatenated):
        units += [partial(_gate_of, unit, None, None, interleaved) for unit in GATE_ACTIVATIONS]
        for alpha, limit in NUMBERS:
            if hasattr(module, limit):
                units.append(partial(_gate_of, "silu", None, limit, interleaved))
                if hasattr(module, alpha):
                    units.append(partial(_gate_of, "silu", alpha, limit, interleaved))
    with random_numbers(module):
        for gate_of in units:
            x = torch.randn(9, width)
            by_products = partial(_routed, partial(_compute, gate_of), count)
            try:
                if is_proved(module, by_products, [x, 0.1 * x, 30.0 * x], class_forward):
                    forward = partial(_forward, gate_of, uncalled)
                    setattr(forward, TAKES_FACTORS, True)
                    setattr(forward, TAKES_STACKS, True)
                    return Form(FUSED_EXPERTS, forward)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                return None
    return None


def _routed(compute: Callable[..., Tensor], count: int, module: Any, x: Tensor) -> Tensor:
    """Return ``compute(module, x, experts, shares)`` behind a router of fixed random numbers.

    Through the router the gradient of x contains that of the shares. The last of several experts
    gets no token.
    """
    generator = torch.Generator().manual_seed(11)
    used = max(1, count - 1)
    experts = torch.rand(len(x), used, generator=generator).topk(min(2, used)).indices
    router = torch.randn(x.shape[1], experts.shape[1], generator=generator)
    shares = torch.sigmoid(x @ router / x.shape[1] ** 0.5)
    return compute(module, x, experts, shares)


def _compute(
    gate_of: GateOf,
    module: Any,
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    factors: Mapping[str, Factors] | None = None,
    stacks: Mapping[str, Any] | None = None,
) -> Tensor:
    """Compute the experts by grouped products.

    Args:
        gate_of: reads the unit.
        module: the module of experts.
        x: ``[T, D]``.
        experts: expert ids of each token, ``[T, k]``.
        shares: router weights of each token, ``[T, k]``.
        factors: adapters by the names of weights.
        stacks: weights by name, in place of the module's own.
    """
    adapters = factors or {}
    source = source_of(stacks)
    if source is not None:
        of_first, of_second = (_adapter(adapters.get(name)) for name in _PRODUCTS)
        return source.compute(x, experts, shares, of_first, of_second, gate_of(module))
    formats: dict[str, FP8Experts] = {}
    if stacks is None:
        formats = vars(module).get(IN_FP8, {})
    products = []
    for name in _PRODUCTS:
        names = (name, f"{name}_bias") if module.has_bias else (name,)
        weight, *biases = (getattr(module, n) if stacks is None else stacks[n] for n in names)
        bias = biases[0] if biases else None
        if name in formats and formats[name].weight is not weight:  # the parameter was replaced
            old = formats[name]
            formats[name] = type(old)(weight, old.transposed, old.device)
        in_fp8 = formats.get(name)
        adapter = adapters.get(name)
        if adapter is None:
            products.append(ExpertWeights(weight, module.is_transposed, bias, in_fp8=in_fp8))
            continue
        down = adapter.down_ERK
        up = adapter.up_ENR.contiguous()
        products.append(
            ExpertWeights(weight, module.is_transposed, bias, down, up, adapter.scale, in_fp8)
        )
    first, second = products
    rows = x.to(first.weight.dtype)
    return fused_experts(rows, experts, shares, first, second, gate_of(module)).to(x.dtype)


def _adapter(factors: Factors | None) -> Adapter | None:
    """Return an adapter as streamed experts take it."""
    if factors is None:
        return None
    return Adapter(factors.down_ERK, factors.up_ENR.contiguous(), factors.scale)


def _forward(
    gate_of: GateOf,
    uncalled: Uncalled,
    module: Any,
    hidden_states: Tensor,
    *routed: Any,
    factors: Mapping[str, Factors] | None = None,
    stacks: Mapping[str, Any] | None = None,
    **named: Any,
) -> Tensor | None:
    """Run the experts in place of their class's forward.

    Args:
        gate_of: reads the unit.
        uncalled: functions and children that the products compute themselves.
        module: the module of experts.
        hidden_states: ``[T, D]``.
        *routed: expert ids and shares.
        factors: adapters by the names of weights.
        stacks: weights by name, in place of the module's own.
        **named: expert ids and shares that are passed by name.

    Returns:
        The output; None if the class has to run but there are adapters, which the caller adds to
        the weights then.
    """
    _warn_of_another_implementation(module)
    # no grouped product takes weights of other classes or dtypes
    weights = [getattr(module, name) for name in _PRODUCTS]
    plain = all(
        type(weight) in (Tensor, nn.Parameter) and weight.dtype in _DTYPES for weight in weights
    )
    autocast = torch.is_autocast_enabled(hidden_states.device.type)
    needs_class = is_parallel(module) or not plain or autocast
    if not needs_class and not uncalled.changed(module):
        experts, shares = (*routed, *named.values())
        return _compute(gate_of, module, hidden_states, experts, shares, factors, stacks)
    if source_of(stacks) is not None:
        raise ValueError(
            f"the experts of {type(module).__name__} are streamed from host memory, and only its "
            "products compute them: not under autocast (mixed_precision='fp16'), nor with experts "
            "on several ranks or functions of the class replaced"
        )
    device = None
    if stacks is None:
        formats: dict[str, FP8Experts] = vars(module).get(IN_FP8, {})
        # weights in host memory, for which FP8 multiplies, wait for the device of their products
        waiting = (in_fp8.waits_for for in_fp8 in formats.values())
        device = next((place for place in waiting if place is not None), None)
    if factors is not None:
        if device is not None:
            raise ValueError(
                f"memory=['offload_frozen_weights']: {type(module).__name__} {OTHERWISE}; "
                "leave it out"
            )
        return None
    if device is not None:
        stacks = {name: p.to(device) for name, p in module._parameters.items() if p is not None}
    if stacks is None:
        output: Tensor = type(module).forward(module, hidden_states, *routed, **named)
        return output
    # the class's forward is looked up by name
    replacement = vars(module).pop("forward")
    try:
        return as_class(module, stacks, (hidden_states, *routed), named)
    finally:
        module.forward = replacement


IMPLEMENTATION = "_chronicals_experts_implementation"
"""Attribute of a patched module: transformers' implementation of its experts at that time."""


def _warn_of_another_implementation(module: Any) -> None:
    """Warn once if another implementation was set since patching, except by ``generate``."""
    now = getattr(getattr(module, "config", None), "_experts_implementation", None)
    then = vars(module).get(IMPLEMENTATION, now)  # a twin has none
    if (
        now != then
        and (then, now) != ("grouped_mm", "batched_mm")
        and not torch.compiler.is_compiling()
    ):
        log_once(
            logger.warning,
            f"experts_implementation={now!r}: set after patch_model and without effect on "
            f"{type(module).__name__}, which runs as {FUSED_EXPERTS}; call unpatch_model first",
        )
