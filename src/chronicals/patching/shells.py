"""Shells: small copies of modules of the user's model, in fp32 on the CPU, without their tensors.

A shell has the class of the module and its settings. Its vectors, and the linear layers among its
children (quantised, adapted or on the meta device as they may be), are new, small and random. Its
numbers, such as an epsilon, are random, too, so that a form which does not read them from the
instance differs.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from chronicals.patching.forms import numbers

SHELL_WIDTHS = (24, 40, 56, 72)
"""Small widths that replace the widths of a module, in ascending order; none is a multiple of
another.
"""


class NoShell(ValueError):
    """The module has something that a shell cannot represent; the message says what."""


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a child has the sizes of a linear layer, as adapters and quantised layers do,
    too.
    """
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(type(size) is int for size in sizes)


def shell_of(module: nn.Module) -> nn.Module:
    """Return a shell of ``module`` in training mode.

    Raises:
        NoShell: it has tensors other than vectors and linear layers.
    """
    if any(buffer is not None for buffer in module._buffers.values()):
        raise NoShell("it has buffers")
    shell = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[name] = {}
    vars(shell).pop("forward", None)
    shell.training = True
    for name, value in vars(shell).items():
        is_hooks = name.endswith("_hooks") or name.startswith("_forward_hooks")
        if is_hooks and isinstance(value, dict):
            vars(shell)[name] = type(value)()
    small = _small_widths(module)
    for name, parameter in module._parameters.items():
        if parameter is None:
            shell._parameters[name] = None
            continue
        if parameter.dim() != 1:
            raise NoShell("it has parameters that are not vectors")
        width = small.get(len(parameter), len(parameter))
        values = torch.empty(width, device="cpu", dtype=torch.float32).uniform_(0.5, 1.5)
        shell._parameters[name] = nn.Parameter(values)
    for name, child in module._modules.items():
        shell._modules[name] = _child(child, small)
    for part in shell.modules():
        for name in numbers(part):
            if getattr(part, name) not in (0.0, 1.0):  # these are rather switches
                setattr(part, name, float(torch.empty(()).uniform_(0.01, 0.1)))
    for name, value in list(vars(shell).items()):
        if type(value) is int and value in small:
            vars(shell)[name] = small[value]
    return shell


def _small_widths(module: nn.Module) -> dict[int, int]:
    """Return small widths by the widths of the linear children. A width that is twice another one,
    as of a merged layer, stays so.
    """
    small: dict[int, int] = {}
    unused = iter(SHELL_WIDTHS)
    sizes: set[int] = set()
    for child in module._modules.values():
        if is_linear(child):
            sizes.update(_sizes(child))
    for size in sorted(sizes):
        half = small.get(size // 2) if size % 2 == 0 and size // 2 in sizes else None
        small[size] = 2 * half if half else next(unused, 0)
        if not small[size]:
            raise NoShell(f"its linear layers have more than {len(SHELL_WIDTHS)} widths")
    return small


def _sizes(linear: Any) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _child(child: nn.Module | None, small: dict[int, int]) -> nn.Module | None:
    if child is None:
        return None
    if is_linear(child):
        inputs, outputs = (small[size] for size in _sizes(child))
        has_bias = getattr(child, "bias", None) is not None
        linear = nn.Linear(inputs, outputs, bias=has_bias, device="cpu", dtype=torch.float32)
        nn.init.normal_(linear.weight, std=inputs**-0.5)
        return linear
    if next(itertools.chain(child.parameters(), child.buffers()), None) is not None:
        raise NoShell("it has children with parameters that are no linear layers")
    return copy.deepcopy(child).train()
