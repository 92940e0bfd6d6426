"""Shells: a module of the user's model rebuilt small, in fp32 on the CPU, with nothing of it but
what is not a tensor.

A shell has the class of the module and its settings. Its own vectors, and the linear layers among
its children (whatever they have become: quantised, adapted, on the meta device), are new, small and
random; so are its numbers, such as an epsilon: what is not read from the instance shows.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from chronicals.patching.forms import numbers

WIDTHS = (24, 40, 56, 72)
"""Small widths that stand for the widths of a module, in the order in which they are met; no
multiples of each other.
"""


class NoShell(ValueError):
    """The module holds something that a shell cannot stand for."""


def is_linear(module: nn.Module | None) -> bool:
    """Whether a child is a linear layer by what it offers: adapters and quantised layers keep
    these names.
    """
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(type(size) is int for size in sizes)


def shell_of(module: nn.Module) -> nn.Module:
    """A shell of ``module`` in training mode.

    Raises:
        NoShell: it holds tensors other than vectors and linear layers.
    """
    if any(buffer is not None for buffer in module._buffers.values()):
        raise NoShell("it has buffers")
    shell = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[name] = {}
    vars(shell).pop("forward", None)
    shell.training = True
    for name in (
        name for name in vars(shell) if name.endswith("_hooks") or name.startswith("_forward_hooks")
    ):
        if isinstance(vars(shell)[name], dict):
            vars(shell)[name] = type(vars(shell)[name])()
    small = _small_widths(module)
    for name, parameter in module._parameters.items():
        shell._parameters[name] = None if parameter is None else _vector(parameter, small)
    for name, child in module._modules.items():
        shell._modules[name] = _child(child, small)
    _with_small_numbers(shell, small)
    return shell


def _small_widths(module: nn.Module) -> dict[int, int]:
    """The widths of the linear children, and what stands for each; a merged layer is as wide as
    its parts together.
    """
    met: dict[int, int] = {}
    fresh = iter(WIDTHS)
    sizes = [
        size for child in module._modules.values() if is_linear(child) for size in _sizes(child)
    ]
    for size in sorted(set(sizes)):
        half = met.get(size // 2) if size % 2 == 0 and size // 2 in sizes else None
        met[size] = 2 * half if half else next(fresh, 0)
        if not met[size]:
            raise NoShell(f"its linear layers have more than {len(WIDTHS)} widths")
    return met


def _sizes(linear: Any) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _vector(parameter: nn.Parameter, small: dict[int, int]) -> nn.Parameter:
    if parameter.dim() != 1:
        raise NoShell("it has parameters that are not vectors")
    width = small.get(len(parameter), len(parameter))
    return nn.Parameter(torch.empty(width, device="cpu", dtype=torch.float32).uniform_(0.5, 1.5))


def _child(child: nn.Module | None, small: dict[int, int]) -> nn.Module | None:
    if child is None:
        return None
    if is_linear(child):
        into, out = (small[size] for size in _sizes(child))
        linear = nn.Linear(
            into,
            out,
            bias=getattr(child, "bias", None) is not None,
            device="cpu",
            dtype=torch.float32,
        )
        nn.init.normal_(linear.weight, std=into**-0.5)
        return linear
    if next(itertools.chain(child.parameters(), child.buffers()), None) is not None:
        raise NoShell("it has children with parameters that are no linear layers")
    return copy.deepcopy(child).train()


def _with_small_numbers(shell: nn.Module, small: dict[int, int]) -> None:
    for part in shell.modules():
        for name in numbers(part):
            if getattr(part, name) not in (0.0, 1.0):  # these are switches rather
                setattr(part, name, float(torch.empty(()).uniform_(0.01, 0.1)))
    for name, value in list(vars(shell).items()):
        if type(value) is int and value in small:
            vars(shell)[name] = small[value]
