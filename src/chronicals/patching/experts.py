"""The experts of a layer as transformers 5 defines them, through the grouped products of
``kernels/fused_experts.py``.

What is recognised: a module with transformers' description of its experts
(``use_experts_implementation``), a gate and two 3-D parameters, whichever way these lie, with
biases or without, whose unit is one of ``CANDIDATES``. It is proved like any other part, by values
and the gradients of its input, of its router's shares and of its parameters. The router stays the
class's own. Under autocast, with experts on several ranks, or weights of a type that no product
takes, the class's own forward runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.expert_glu import GATE_ACTIVATIONS, Gate
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.lora.expert_products import FLAGS, TAKES_FACTORS, Factors, is_parallel
from chronicals.patching.forms import Form, is_proved, random_numbers
from chronicals.patching.fp8_experts import device_of_waiting, format_of
from chronicals.patching.gated_mlps import Uncalled
from chronicals.quantization.experts import TAKES_STACKS, as_class

logger = logging.getLogger(__name__)

BY = "fused experts"

GateOf = Callable[[Any], Gate]
"""Reads the unit of a module, whose numbers may differ from those of the module that was proved."""

NUMBERS = (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit"))
"""Names under which classes keep the numbers of a clamped unit."""

PRODUCTS = ("gate_up_proj", "down_proj")
OTHERWISE = "has adapters beside products of its class, which look for its weights on the card"

KINDS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _plain(activation: str, interleaved: bool, _module: Any) -> Gate:
    return Gate(activation, interleaved=interleaved)


def _limited(limit: str, interleaved: bool, module: Any) -> Gate:
    return Gate(limit=getattr(module, limit), interleaved=interleaved)


def _scaled(alpha: str, limit: str, interleaved: bool, module: Any) -> Gate:
    return Gate("silu", getattr(module, alpha), getattr(module, limit), 1.0, interleaved)


def _candidates(module: nn.Module) -> Iterable[GateOf]:
    for interleaved in (
        not getattr(module, "is_concatenated", True),
        getattr(module, "is_concatenated", True),
    ):
        for activation in GATE_ACTIVATIONS:
            yield partial(_plain, activation, interleaved)
        for alpha, limit in NUMBERS:
            if hasattr(module, limit):
                yield partial(_limited, limit, interleaved)
                if hasattr(module, alpha):
                    yield partial(_scaled, alpha, limit, interleaved)


def recognise_experts(module: nn.Module) -> Form | None:
    """The form of ``module``, an instance of a twin, or None where it holds no experts that the
    products compute.
    """
    described = all(hasattr(module, flag) for flag in FLAGS) and hasattr(module, "is_concatenated")
    if (
        not described
        or not getattr(module, "has_gate", False)
        or getattr(module, "has_post_expert_norm", False)
    ):
        return None
    names = {
        *PRODUCTS,
        *(f"{name}_bias" for name in PRODUCTS if getattr(module, "has_bias", False)),
    }
    own = {
        name: parameter for name, parameter in module._parameters.items() if parameter is not None
    }
    if (
        own.keys() != names
        or any(own[name].ndim != 3 for name in PRODUCTS)
        or any(True for _ in module._buffers)
    ):
        return None
    uncalled = Uncalled(module, module._modules)
    count, *sizes = own["down_proj"].shape
    width = sizes[module.is_transposed is True]
    with random_numbers(module):
        for gate_of in _candidates(module):
            x = torch.randn(9, width)
            try:
                if is_proved(
                    module,
                    _routed(partial(_compute, gate_of), count),
                    [x, 0.1 * x, 30.0 * x],
                    _routed(_class, count),
                ):
                    forward = partial(_forward, gate_of, uncalled)
                    setattr(forward, TAKES_FACTORS, True)
                    setattr(forward, TAKES_STACKS, True)
                    return Form(BY, forward)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                return None
    return None


def _class(module: Any, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    return type(module).forward(module, x, experts, shares)


def _routed(compute: Callable[..., Tensor], count: int) -> Callable[[Any, Tensor], Tensor]:
    """Through a router of fixed random numbers, so that the gradient of x holds that of the
    shares; the last expert has no token where there are several."""
    generator = torch.Generator().manual_seed(11)

    def forward(module: Any, x: Tensor) -> Tensor:
        generator.manual_seed(11)
        chosen = (
            torch.rand(len(x), max(1, count - 1), generator=generator)
            .topk(min(2, max(1, count - 1)))
            .indices
        )
        router = torch.randn(x.shape[1], chosen.shape[1], generator=generator)
        return compute(module, x, chosen, torch.sigmoid(x @ router / x.shape[1] ** 0.5))

    return forward


def _compute(
    gate_of: GateOf,
    module: Any,
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    factors: Mapping[str, Factors] | None = None,
    stacks: Mapping[str, Any] | None = None,
) -> Tensor:
    first, second = (_weights(module, name, (factors or {}).get(name), stacks) for name in PRODUCTS)
    return fused_experts(
        x.to(first.weight.dtype), experts, shares, first, second, gate_of(module)
    ).to(x.dtype)


def _weights(
    module: Any, name: str, factors: Factors | None, stacks: Mapping[str, Any] | None
) -> ExpertWeights:
    names = (name, f"{name}_bias") if module.has_bias else (name,)
    weight, *biases = (getattr(module, name) if stacks is None else stacks[name] for name in names)
    bias = biases[0] if biases else None
    in_fp8 = format_of(module, name) if stacks is None else None
    if factors is None:
        return ExpertWeights(weight, module.is_transposed, bias, in_fp8=in_fp8)
    down = factors.down_ERK
    up = factors.up_ENR.contiguous()
    return ExpertWeights(weight, module.is_transposed, bias, down, up, factors.scale, in_fp8)


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
    _tell_another_implementation(module)
    if _runs_otherwise(module, hidden_states) or uncalled.changed(module):
        waits_for = device_of_waiting(module) if stacks is None else None
        if factors is not None:
            if waits_for is not None:
                raise ValueError(
                    f"memory=['offload_frozen_weights']: {type(module).__name__} {OTHERWISE}; "
                    "leave it out"
                )
            return None
        if waits_for is not None:
            stacks = {
                name: p.to(waits_for) for name, p in module._parameters.items() if p is not None
            }
        if stacks is not None:
            with _own_forward(module):
                computed: Tensor = as_class(module, stacks, (hidden_states, *routed), named)
            return computed
        own: Tensor = type(module).forward(module, hidden_states, *routed, **named)
        return own
    experts, shares = (*routed, *named.values())
    return _compute(gate_of, module, hidden_states, experts, shares, factors, stacks)


@contextmanager
def _own_forward(module: Any) -> Iterator[None]:
    """Within: the class's forward, which is looked up by name."""
    ours = vars(module).pop("forward")
    try:
        yield
    finally:
        module.forward = ours


IMPLEMENTATION = "_chronicals_experts_implementation"
"""Attribute of a patched module: transformers' implementation of its experts when it was
patched.
"""


def keep_implementation(module: nn.Module) -> None:
    """To be called where ``module`` is patched."""
    vars(module)[IMPLEMENTATION] = _implementation(module)


def _implementation(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _tell_another_implementation(module: Any) -> None:
    """Where one was set since, but for the one that ``generate`` sets for itself."""
    now = _implementation(module)
    then = vars(module).get(IMPLEMENTATION, now)  # a twin's is not kept
    if (
        now != then
        and (then, now) != ("grouped_mm", "batched_mm")
        and not torch.compiler.is_compiling()
    ):
        _tell(type(module).__name__, now)


@functools.cache
def _tell(name: str, implementation: str | None) -> None:
    logger.warning(
        "experts_implementation=%r: set after patch_model and without effect on %s, which runs as "
        "%s; call unpatch_model first",
        implementation,
        name,
        BY,
    )


def _runs_otherwise(module: Any, x: Tensor) -> bool:
    weights = [getattr(module, name) for name in PRODUCTS]
    plain = all(
        type(weight) in (Tensor, nn.Parameter) and weight.dtype in KINDS for weight in weights
    )
    return is_parallel(module) or not plain or torch.is_autocast_enabled(x.device.type)
