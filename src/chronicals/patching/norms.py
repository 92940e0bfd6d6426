"""Norms: a module without children and with vectors only, that normalises the last dimension."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_layernorm, fused_rmsnorm
from chronicals.patching.forms import (
    Form,
    Forward,
    as_called,
    is_proved,
    numbers,
    random_numbers,
    takes_one_tensor,
)

UNWEIGHTED_WIDTH = 16
CONSTANTS = (1e-5, 1e-6)
"""Epsilons that some classes have in their forward."""

Epsilon = Callable[[nn.Module, Tensor], float]


@dataclass(frozen=True)
class RMSNormReads:
    """Where an RMSNorm keeps its weight and its epsilon, and what it adds to the weight."""

    weight: str | None
    epsilon: Epsilon
    offset: float

    def arguments(self, module: nn.Module, x: Tensor) -> tuple[Tensor | None, float, float]:
        """Return the arguments of ``fused_rmsnorm`` after x: weight, epsilon and offset."""
        return (
            None if self.weight is None else getattr(module, self.weight),
            self.epsilon(module, x),
            self.offset,
        )


def recognise_norm(module: nn.Module) -> Form | None:
    """The form of ``module``, an instance of a twin, or None where it is no norm that a kernel
    computes.
    """
    vectors = {name: p for name, p in module._parameters.items() if p is not None}
    widths = {tuple(p.shape) for p in vectors.values()}
    if (
        any(module.children())
        or len(vectors) > 2
        or len(widths) > 1
        or any(len(shape) != 1 for shape in widths)
    ):
        return None
    width = next(iter(widths))[0] if widths else _kept_width(module)
    if not takes_one_tensor(module) or width is None:
        return None
    with random_numbers(module):
        inputs = [
            torch.randn(3, 5, width) * scale for scale in (1.0, 3e-3, 300.0)
        ]  # epsilon counts, or a bound
        try:
            for by, forward, reads in _candidates(module, list(vectors)):
                if is_proved(module, forward, inputs):
                    return Form(
                        by, as_called(module, _of_its_type(module, forward, inputs[0])), reads
                    )
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # a module that does not take such a tensor is no norm
    return None


def _kept_width(module: nn.Module) -> int | None:
    """The width that a norm without vectors takes: the last of a shape that it keeps, or any
    where it keeps an epsilon.
    """
    shapes = [
        shape
        for shape in vars(module).values()
        if isinstance(shape, tuple) and shape and type(shape[-1]) is int
    ]
    widths = [shape[-1] for shape in shapes if shape[-1] > 0]
    return widths[0] if widths else UNWEIGHTED_WIDTH if numbers(module) else None


def _candidates(
    module: nn.Module, vectors: list[str]
) -> Iterator[tuple[str, Forward, RMSNormReads | None]]:
    for weight, bias in [(w, b) for w, b in itertools.permutations([*vectors, None, None], 2)][
        :: 1 if vectors else 2
    ]:
        if {weight, bias} - {None} != set(vectors):
            continue
        for epsilon in epsilons(module):
            if bias is None:
                for offset in (0.0, 1.0) if weight else (0.0,):
                    reads = RMSNormReads(weight, epsilon, offset)
                    yield "fused_rmsnorm", _rmsnorm(reads), reads
            yield "fused_layernorm", _layernorm(weight, bias, epsilon), None


def epsilons(module: nn.Module) -> Iterator[Epsilon]:
    for name in numbers(module):
        yield lambda module, x, name=name: getattr(module, name)  # type: ignore[misc]
    if not numbers(module):
        for constant in CONSTANTS:
            yield lambda module, x, constant=constant: constant  # type: ignore[misc]
        yield lambda module, x: torch.finfo(x.dtype).eps  # torch.nn.RMSNorm without one


def _rmsnorm(reads: RMSNormReads) -> Forward:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return fused_rmsnorm(x, *reads.arguments(module, x))

    return forward


def _layernorm(weight: str | None, bias: str | None, epsilon: Epsilon) -> Forward:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        w, b = (None if name is None else getattr(module, name) for name in (weight, bias))
        return fused_layernorm(x, w, b, epsilon(module, x))

    return forward


def _of_its_type(module: nn.Module, forward: Forward, x: Tensor) -> Forward:
    """Some classes return the type of the input, some the wider one of input and weight."""
    with torch.no_grad():
        try:
            narrow = type(module).forward(module, x.bfloat16()).dtype == torch.bfloat16  # type: ignore[operator]
        except RuntimeError:
            narrow = True  # it wants one type for all
        ours = forward(module, x.bfloat16()).dtype
    if not narrow or ours == torch.bfloat16:
        return forward

    def narrowed(module: nn.Module, x: Tensor) -> Tensor:
        return forward(module, x).to(x.dtype)

    return narrowed
