"""Recognise norms: modules without children and with vectors only.

They normalise the last dimension. Gated norms, those of linear attention, have a vector and two
inputs: ``silu(gate) · norm(x)`` or ``norm(silu(gate) · x)``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_layernorm, fused_rmsnorm, fused_swiglu
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

GATED_NORM = "fused_rmsnorm + fused_swiglu"
"""Name of the replacement of gated norms."""

Epsilon = Callable[[nn.Module, Tensor], float]
Gated = Callable[[Any, Tensor, Tensor], Tensor]


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
    width = next(iter(widths))[0] if widths else None
    if width is None:
        # the last of a shape that it stores, or any width if it stores an epsilon
        for shape in vars(module).values():
            if isinstance(shape, tuple) and shape and type(shape[-1]) is int and shape[-1] > 0:
                width = shape[-1]
                break
        else:
            width = UNWEIGHTED_WIDTH if numbers(module) else None
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


def _candidates(
    module: nn.Module, vectors: list[str]
) -> Iterator[tuple[str, Forward, RMSNormReads | None]]:
    """Yield name, forward and reads of the norms that the module may be.

    Args:
        module: the module.
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
                    yield "fused_rmsnorm", partial(_rmsnorm, reads), reads
            yield "fused_layernorm", partial(_layernorm, weight, bias, epsilon), None


def epsilons(module: nn.Module) -> Iterator[Epsilon]:
    """Yield the ways in which a norm may get its epsilon."""
    for name in numbers(module):
        yield lambda module, x, name=name: getattr(module, name)  # type: ignore[misc]
    if not numbers(module):
        for constant in CONSTANT_EPSILONS:
            yield lambda module, x, constant=constant: constant  # type: ignore[misc]
        yield lambda module, x: torch.finfo(x.dtype).eps  # torch.nn.RMSNorm without one


def _rmsnorm(reads: RMSNormReads, module: nn.Module, x: Tensor) -> Tensor:
    return fused_rmsnorm(x, *reads.arguments(module, x))


def _layernorm(
    weight: str | None, bias: str | None, epsilon: Epsilon, module: nn.Module, x: Tensor
) -> Tensor:
    w, b = (None if name is None else getattr(module, name) for name in (weight, bias))
    return fused_layernorm(x, w, b, epsilon(module, x))


def _with_output_dtype(module: nn.Module, forward: Forward, x: Tensor) -> Forward:
    """Return ``forward`` with the output dtype of the class.

    That is the input's dtype, or the wider one of input and weight.
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


def recognise_gated_norm(module: nn.Module) -> Form | None:
    """Return the form of a module of a twin; None if kernels compute no such gated norm."""
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
        for epsilon, gate_first in itertools.product(epsilons(module), (False, True)):
            forward = partial(_gated_norm, vectors[0], epsilon, gate_first)
            try:
                if is_proved(module, _of_one_tensor(forward), inputs, own):
                    return Form(GATED_NORM, partial(_gated_as_called, forward, names))
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                return None  # a module that does not take two such tensors is no gated norm
    return None


def _gated_norm(
    weight: str, epsilon: Epsilon, gate_first: bool, module: Any, x: Tensor, gate: Tensor
) -> Tensor:
    """Return ``norm(silu(gate) · x)`` or, unless ``gate_first``, ``silu(gate) · norm(x)``.

    Args:
        weight: name of the norm's vector.
        epsilon: reads its epsilon.
        gate_first: the gate is applied before the norm.
        module: the norm.
        x: its input.
        gate: its other input.
    """
    if gate_first:
        gated = fused_swiglu(gate, x.to(gate.dtype))
        return fused_rmsnorm(gated, getattr(module, weight), epsilon(module, x)).to(x.dtype)
    normed = fused_rmsnorm(x, getattr(module, weight), epsilon(module, x))
    return fused_swiglu(gate, normed.to(gate.dtype)).to(x.dtype)


def _of_one_tensor(forward: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return ``forward`` for input and gate side by side in one tensor, as a proof passes them."""
    return lambda module, both: forward(module, *both.chunk(2, -1))


def _gated_as_called(
    forward: Gated, names: list[str], module: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Call ``forward`` for a caller that may name its arguments ``names``.

    Without a gate of the input's shape the class's own forward runs.
    """
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
