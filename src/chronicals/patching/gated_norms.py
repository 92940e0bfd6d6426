"""Gated norms of linear attention: a vector and two inputs, ``silu(gate) · norm(x)`` or
``norm(silu(gate) · x)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_rmsnorm, fused_swiglu
from chronicals.patching.forms import Form, is_proved, random_numbers
from chronicals.patching.norms import epsilons

BY = "fused_rmsnorm + fused_swiglu"

Gated = Callable[[Any, Tensor, Tensor], Tensor]


def recognise_gated_norm(module: nn.Module) -> Form | None:
    """Return the form of a module of a twin, or None if it is no gated norm that kernels compute."""
    vectors = [name for name, p in module._parameters.items() if p is not None]
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(vectors) != 1 or len(names) != 2 or any(module.children()):
        return None
    weight = module.get_parameter(vectors[0])
    if weight.dim() != 1:
        return None
    x = torch.randn(3, 5, 2 * len(weight))  # input and gate side by side
    inputs = [x, 3e-3 * x, 30.0 * x]
    own = _of_one_tensor(type(module).forward)
    with random_numbers(module):
        for forward in _candidates(module, vectors[0]):
            try:
                if is_proved(module, _of_one_tensor(forward), inputs, own):
                    return Form(BY, _as_called(forward, names))
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                return None  # a module that does not take two such tensors is no gated norm
    return None


def _candidates(module: nn.Module, weight: str) -> Iterator[Gated]:
    """Yield forwards that the module may compute; ``weight`` is the name of its vector."""
    for epsilon in epsilons(module):

        def gated_after(module: Any, x: Tensor, gate: Tensor, epsilon: Any = epsilon) -> Tensor:
            normed = fused_rmsnorm(x, getattr(module, weight), epsilon(module, x))
            return fused_swiglu(gate, normed.to(gate.dtype)).to(x.dtype)

        def gated_before(module: Any, x: Tensor, gate: Tensor, epsilon: Any = epsilon) -> Tensor:
            gated = fused_swiglu(gate, x.to(gate.dtype))
            return fused_rmsnorm(gated, getattr(module, weight), epsilon(module, x)).to(x.dtype)

        yield from (gated_after, gated_before)


def _of_one_tensor(forward: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return ``forward`` for input and gate side by side in one tensor, as a proof passes them."""
    return lambda module, both: forward(module, *both.chunk(2, -1))


def _as_called(forward: Gated, names: list[str]) -> Callable[..., Tensor]:
    """Return ``forward`` for callers that may name its arguments. Without a gate of the input's
    shape the class's own forward runs.
    """

    def called(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(names, args)) | kwargs
        x, gate = (arguments.get(name) for name in names)
        if (
            len(arguments) == 2
            and isinstance(x, Tensor)
            and isinstance(gate, Tensor)
            and x.shape == gate.shape
        ):
            return forward(module, x, gate)
        return type(module).forward(module, *args, **kwargs)

    return called
