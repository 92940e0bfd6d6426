"""Recognise norms: modules without children and with vectors only that normalise the last
dimension.
"""

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
"""Width of the input on which a norm without a vector is proved."""

CONSTANT_EPSILONS = (1e-5, 1e-6)
"""Epsilons that some classes have as a constant in their forward."""

Epsilon = Callable[[nn.Module, Tensor], float]


@dataclass(frozen=True)
class RMSNormReads:
    """The parts of an RMSNorm.

    Attributes:
        weight: name of its vector, or None.
        epsilon: reads its epsilon.
        offset: number that it adds to the weight.
    """

    weight: str | None
    epsilon: Epsilon
    offset: float

    def arguments(self, module: nn.Module, x: Tensor) -> tuple[Tensor | None, float, float]:
        """Return the arguments of ``fused_rmsnorm`` after x: weight, epsilon and offset."""
        weight = None if self.weight is None else getattr(module, self.weight)
        return weight, self.epsilon(module, x), self.offset


def recognise_norm(module: nn.Module) -> Form | None:
    """Return the form of a module of a twin, or None if it is no norm that a kernel computes."""
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
        # with small inputs epsilon counts, with large ones an upper bound would
        inputs = [torch.randn(3, 5, width) * scale for scale in (1.0, 3e-3, 300.0)]
        try:
            for by, forward, reads in _candidates(module, list(vectors)):
                if is_proved(module, forward, inputs):
                    forward = _with_output_dtype(module, forward, inputs[0])
                    return Form(by, as_called(module, forward), reads)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # a module that does not take such a tensor is no norm
    return None


def _kept_width(module: nn.Module) -> int | None:
    """Return the width that a norm without vectors takes: the last of a shape that it stores, or
    any width if it stores an epsilon; else None, as it is no norm.
    """
    shapes = [
        shape
        for shape in vars(module).values()
        if isinstance(shape, tuple) and shape and type(shape[-1]) is int
    ]
    widths = [shape[-1] for shape in shapes if shape[-1] > 0]
    if widths:
        return widths[0]
    return UNWEIGHTED_WIDTH if numbers(module) else None


def _candidates(
    module: nn.Module, vectors: list[str]
) -> Iterator[tuple[str, Forward, RMSNormReads | None]]:
    """Yield name, forward and reads of the norms that the module may be.

    Args:
        vectors: names of its vectors, each weight or bias.
    """
    roles = list(itertools.permutations([*vectors, None, None], 2))
    for weight, bias in roles if vectors else roles[:1]:
        if {weight, bias} - {None} != set(vectors):
            continue
        for epsilon in epsilons(module):
            if bias is None:
                for offset in (0.0, 1.0) if weight else (0.0,):
                    reads = RMSNormReads(weight, epsilon, offset)
                    yield "fused_rmsnorm", _rmsnorm(reads), reads
            yield "fused_layernorm", _layernorm(weight, bias, epsilon), None


def epsilons(module: nn.Module) -> Iterator[Epsilon]:
    """Yield the ways in which a norm may get its epsilon."""
    for name in numbers(module):
        yield lambda module, x, name=name: getattr(module, name)  # type: ignore[misc]
    if not numbers(module):
        for constant in CONSTANT_EPSILONS:
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


def _with_output_dtype(module: nn.Module, forward: Forward, x: Tensor) -> Forward:
    """Return ``forward`` with the output dtype of the class: that of the input, or the wider one of
    input and weight.
    """
    with torch.no_grad():
        try:
            narrow = type(module).forward(module, x.bfloat16()).dtype == torch.bfloat16  # type: ignore[operator]
        except RuntimeError:
            narrow = True  # the class takes one dtype for all
        ours = forward(module, x.bfloat16()).dtype
    if not narrow or ours == torch.bfloat16:
        return forward

    def narrowed(module: nn.Module, x: Tensor) -> Tensor:
        return forward(module, x).to(x.dtype)

    return narrowed
