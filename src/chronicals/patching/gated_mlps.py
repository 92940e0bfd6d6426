"""Recognise gated MLPs: two or three linear children, ``down(activation(gate(x)) · up(x))``.

The linear children are called as modules, so adapters, quantised weights and hooks keep working.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_geglu, fused_swiglu
from chronicals.patching.forms import (
    Form,
    Forward,
    as_called,
    attributes,
    does_more,
    drops,
    is_proved,
    module_settings,
    random_numbers,
    takes_one_tensor,
)

ACTIVATIONS = {"fused_swiglu": "silu", "fused_geglu (tanh)": "gelu_tanh", "fused_geglu": "gelu"}
"""Names of activations in ``glu_of_both``, by the names of gates."""


class Uncalled:
    """The parts of a module that a form computes itself instead of calling them.

    They are functions that the module stores, and some children.

    Args:
        proved: the module that the form was proved on.
        names: names of the children.
    """

    def __init__(self, proved: nn.Module, names: Iterable[str]):
        self.settings = _named_settings(proved)
        self.children = []
        for name in names:
            child = getattr(proved, name)
            self.children.append((name, type(child), _named_settings(child)))

    def changed(self, module: nn.Module) -> bool:
        """Return whether a part differs in ``module``, has dropout, hooks or another forward."""
        if _differs(module, self.settings):
            return True
        for name, kind, kept in self.children:
            child = getattr(module, name)
            if type(child) is not kind or _differs(child, kept) or does_more(child) or drops(child):
                return True
        return False


def _named_settings(module: nn.Module) -> list[tuple[str, type, Any]]:
    """Return name, type and value of the settings of a module.

    The value is None for other callables, which every module makes for itself.
    """
    compared = dict(module_settings(module))
    named: list[tuple[str, type, Any]] = [(name, type(x), x) for name, x in compared.items()]
    for name, value in attributes(module).items():
        if callable(value) and name not in compared:
            named.append((name, type(value), None))
    return named


def _differs(module: Any, named: list[tuple[str, type, Any]]) -> bool:
    """Return whether a module has other settings than these."""
    # looked up by name: torch 2.11 does not list a module's attributes while it compiles
    for name, kind, value in named:
        current = getattr(module, name, None)
        if type(current) is not kind or (value is not None and current != value):
            return True
    return False


@dataclass(frozen=True)
class GatedMLPReads:
    """The parts of a gated MLP.

    Attributes:
        first: names of the children whose outputs side by side are gate and up.
        down: name of the last child.
        activation: name of the activation in ``glu_of_both``.
        uncalled: the parts that are computed instead of called.
    """

    first: tuple[str, ...]
    down: str
    activation: str
    uncalled: Uncalled


GatedUnit = Callable[[Tensor, Tensor], Tensor]
"""A gated unit, of gate and up."""

GATES: dict[str, GatedUnit] = {
    "fused_swiglu": fused_swiglu,
    "fused_geglu (tanh)": partial(fused_geglu, approximate="tanh"),
    "fused_geglu": fused_geglu,
}
"""Gated units by name."""


def recognise_gated_mlp(module: nn.Module) -> Form | None:
    """Return the form of a module of a twin, or None if no kernel computes it as a gated MLP."""
    linear = {
        name: child for name, child in module._modules.items() if isinstance(child, nn.Linear)
    }
    others = {
        name: child
        for name, child in module._modules.items()
        if name not in linear and child is not None
    }
    if (
        len(linear) not in (2, 3)
        or module._parameters
        or any(next(x.parameters(), None) is not None for x in others.values())
    ):
        return None
    if not takes_one_tensor(module):
        return None
    uncalled = Uncalled(module, others)
    with random_numbers(module):
        for by, width, forward, reads in _candidates(linear, uncalled):
            x = torch.randn(2, 5, width)
            try:
                if is_proved(module, forward, [x, 0.1 * x, 300.0 * x]):
                    return Form(by, as_called(module, forward, uncalled.changed), reads)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                return None  # a module that does not take such a tensor is no MLP
    return None


def _candidates(
    linear: dict[str, nn.Linear], uncalled: Uncalled
) -> Iterator[tuple[str, int, Forward, GatedMLPReads | None]]:
    """Yield name, input width, forward and reads of the gated MLPs that the module may be.

    Args:
        linear: linear children by name, in two or three of which the widths fit: gate, up and down,
            or the merged layer and down.
        uncalled: the other parts of the module.
    """
    for names in itertools.permutations(linear):
        *first, down = (linear[name] for name in names)
        width = first[0].in_features
        inner = sum(child.out_features for child in first) // 2
        if down.in_features != inner or any(child.in_features != width for child in first):
            continue
        if len(first) == 2 and first[0].out_features != first[1].out_features:
            continue
        for by, activate in GATES.items():
            *inputs, last = names
            reads = GatedMLPReads(tuple(inputs), last, ACTIVATIONS[by], uncalled)
            if len(first) == 2:
                yield by, width, partial(_gated, reads.first, last, activate, True), reads
            else:
                by = f"{by}, merged"
                yield by, width, partial(_gated, reads.first, last, activate, True), reads
                yield by, width, partial(_gated, reads.first, last, activate, False), None


def _gated(
    first: tuple[str, ...],
    down: str,
    activate: GatedUnit,
    gate_first: bool,
    module: nn.Module,
    x: Tensor,
) -> Tensor:
    """Run a gated MLP by its linear children.

    Args:
        first: names of gate and up, or of the merged layer.
        down: name of the last layer.
        activate: the gated unit.
        gate_first: False if up comes before gate.
        module: the MLP.
        x: its input.
    """
    outputs = [getattr(module, name)(x) for name in first]
    gate, up = outputs if len(first) == 2 else outputs[0].chunk(2, -1)
    unit = activate(gate, up) if gate_first else activate(up, gate)
    return getattr(module, down)(unit)
