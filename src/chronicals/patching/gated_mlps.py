"""Gated MLPs: two or three linear children, of which a gate is activated and multiplied.

The linear children are called as modules, so whatever they have become (adapters, quantised
weights, hooks) keeps working.
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
    random_numbers,
    settings,
    takes_one_tensor,
)

ACTIVATIONS = {"fused_swiglu": "silu", "fused_geglu (tanh)": "gelu_tanh", "fused_geglu": "gelu"}
"""By the names of the gates, those of ``glu_of_both``."""


class Uncalled:
    """What a form of ``proved`` computes itself: functions that the module keeps, and the children
    of these names.

    It is looked up by the names there were: torch 2.11 does not list a module's attributes while it
        compiles.
    """

    def __init__(self, proved: nn.Module, names: Iterable[str]):
        self.own = _kept(proved)
        self.children = [
            (name, type(child), _kept(child))
            for name in names
            for child in (getattr(proved, name),)
        ]

    def changed(self, module: nn.Module) -> bool:
        """Whether they are something else in ``module``, one of them drops something, or
        somebody put something into one.
        """
        children = ((getattr(module, name), kind, kept) for name, kind, kept in self.children)
        return _differs(module, self.own) or any(
            type(child) is not kind or _differs(child, kept) or does_more(child) or drops(child)
            for child, kind, kept in children
        )


def _kept(module: nn.Module) -> list[tuple[str, type, Any]]:
    """Names, types and values of its settings; of what else can be called, which every module
    makes itself, no value.
    """
    same = dict(settings(module))
    made = {
        name: value
        for name, value in attributes(module).items()
        if callable(value) and name not in same
    }
    return [(name, type(x), x) for name, x in same.items()] + [
        (name, type(x), None) for name, x in made.items()
    ]


def _differs(module: Any, kept: list[tuple[str, type, Any]]) -> bool:
    there = ((getattr(module, name, None), kind, value) for name, kind, value in kept)
    return any(
        type(x) is not kind or (value is not None and x != value) for x, kind, value in there
    )


@dataclass(frozen=True)
class GatedMLPReads:
    """Names of the children whose outputs side by side are gate and up, of the last child, the
    activation, and what is not called for it."""

    first: tuple[str, ...]
    down: str
    activation: str
    uncalled: Uncalled


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fused_swiglu": fused_swiglu,
    "fused_geglu (tanh)": partial(fused_geglu, approximate="tanh"),
    "fused_geglu": fused_geglu,
}


def recognise_gated_mlp(module: nn.Module) -> Form | None:
    """The form of ``module``, an instance of a twin, or None where it is no gated MLP that a
    kernel computes.
    """
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
                    return Form(by, as_called(module, _unless_changed(forward, uncalled)), reads)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                return None  # a module that does not take such a tensor is no MLP
    return None


def _candidates(
    linear: dict[str, nn.Linear], uncalled: Uncalled
) -> Iterator[tuple[str, int, Forward, GatedMLPReads | None]]:
    """Names of the gate, up and down children (or of the merged and down), where their widths
    allow.
    """
    for names in itertools.permutations(linear):
        *first, down = (linear[name] for name in names)
        inner = sum(child.out_features for child in first) // 2
        if down.in_features != inner or any(
            child.in_features != first[0].in_features for child in first
        ):
            continue
        if len(first) == 2 and first[0].out_features != first[1].out_features:
            continue
        for by, activate in GATES.items():
            if len(first) == 2:
                reads = GatedMLPReads(names[:2], names[2], ACTIVATIONS[by], uncalled)
                yield (
                    by,
                    first[0].in_features,
                    _apart(names[0], names[1], names[2], activate),
                    reads,
                )
            else:
                for gate_first in (True, False):
                    merged = (
                        GatedMLPReads(names[:1], names[1], ACTIVATIONS[by], uncalled)
                        if gate_first
                        else None
                    )
                    yield (
                        f"{by}, merged",
                        first[0].in_features,
                        _merged(names[0], names[1], activate, gate_first),
                        merged,
                    )


def _unless_changed(forward: Forward, uncalled: Uncalled) -> Forward:
    """``forward``, or the class's own where what it does not call is not what was proved."""

    def unless_changed(module: nn.Module, x: Tensor) -> Tensor:
        return type(module).forward(module, x) if uncalled.changed(module) else forward(module, x)

    return unless_changed


def _apart(gate: str, up: str, down: str, activate: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return getattr(module, down)(activate(getattr(module, gate)(x), getattr(module, up)(x)))

    return forward


def _merged(
    both: str, down: str, activate: Callable[[Tensor, Tensor], Tensor], gate_first: bool
) -> Forward:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        halves = getattr(module, both)(x).chunk(2, -1)
        gate, up = halves if gate_first else halves[::-1]
        return getattr(module, down)(activate(gate, up))

    return forward
