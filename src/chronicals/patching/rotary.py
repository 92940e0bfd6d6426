"""Rotary embedding: attention modules whose forward calls a rotation ``(q, k, cos, sin, ...)`` of
their modelling file.

Such an instance gets its class's own forward, in which that name means the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_qk_rope
from chronicals.models.rebinding import rebound
from chronicals.patching.forms import VALUE_TOLERANCE, Form

KERNEL = "fused_qk_rope"
ARGUMENTS = ["q", "k", "cos", "sin"]
WIDTH = 16

Arrangement = Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _pairs_apart(x: Tensor) -> Tensor:
    """Channels (a0, b0, a1, b1, ...) as (a0, a1, ..., b0, b1, ...)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@dataclass(frozen=True)
class Way:
    """How a file rotates, in terms of the kernel.

    Attributes:
        share: width of its tables in those of a head.
        interleaved: whether the channels of a pair lie side by side.
        table: the table that the kernel takes.
        heads: the heads that the kernel takes.
    """

    share: float
    interleaved: bool
    table: Arrangement = _as_it_is
    heads: Arrangement = _as_it_is

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.table(cos), self.table(sin)
        return fused_qk_rope(self.heads(q), self.heads(k), *tables, interleaved=self.interleaved)


LAID = "laid end to end"
"""Of tables that have a channel of each pair."""

WAYS: dict[str, Way] = {
    "": Way(1.0, False),
    "interleaved": Way(1.0, True),
    "interleaved, of the first half": Way(
        1.0, True, lambda x: x[..., : x.shape[-1] // 2].repeat_interleave(2, -1)
    ),
    "interleaved, a channel twice": Way(0.5, True, lambda x: x.repeat_interleave(2, -1)),
    LAID: Way(0.5, False, lambda x: torch.cat((x, x), -1)),
    "pairs apart": Way(1.0, False, heads=_pairs_apart),
    "pairs apart, of the first half": Way(
        1.0, False, lambda x: torch.cat((x[..., : x.shape[-1] // 2],) * 2, -1), _pairs_apart
    ),
}


def recognise_rotary(module: nn.Module) -> Form | None:
    """The form of an attention module that rotates queries and keys as the kernel does, or None."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    own = {
        name: forward.__globals__[name]
        for name in forward.__code__.co_names
        if _rotates(forward.__globals__.get(name))
    }
    found = {name: _way(function) for name, function in own.items()}
    ways = {name: way for name, way in found.items() if way is not None}
    if not ways or len(ways) < len(own):
        return None
    by = "; ".join(dict.fromkeys(f"{KERNEL}, {way}" if way else KERNEL for way in ways.values()))
    rotations = {name: _rotation(own[name], WAYS[way]) for name, way in ways.items()}
    made = rebound(type(module).forward, rotations, "rotary")  # type: ignore[arg-type]
    return None if made is None else Form(by, made)


def _rotates(function: Any) -> bool:
    return (
        isinstance(function, FunctionType)
        and list(inspect.signature(function).parameters)[:4] == ARGUMENTS
    )


def _way(own: Callable) -> str | None:
    return next((name for name, way in WAYS.items() if _equal(own, way)), None)


def _equal(own: Callable, way: Way) -> bool:
    """On random tensors and tables, forward and backward."""
    q, k = (torch.randn(2, heads, 5, WIDTH, requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.randn(2, 5, int(WIDTH * way.share)) for _ in range(2))
    found = []
    for function in (own, way):
        try:
            out = function(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # it wants other tensors than these
        upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(4)) for x in out]
        found.append([*out, *torch.autograd.grad(out, (q, k), upstream)])
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= VALUE_TOLERANCE * a.abs().max())
        for a, b in zip(*found)
    )


def _rotation(own: Callable, way: Way) -> Callable:
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        usual = (
            not rest
            and q.ndim == 4
            and cos.ndim == 3
            and q.dtype == k.dtype == cos.dtype
            and cos.device == q.device
        )
        if usual and not options:
            return way(q, k, cos, sin)
        if usual and options == {"unsqueeze_dim": 2}:
            q, k = way(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2)
        return own(q, k, cos, sin, *rest, **options)

    return rotate
