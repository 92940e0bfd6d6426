"""Recognise rotary embedding: attention modules whose forward calls a rotation of their file.

The rotation takes ``(q, k, cos, sin, ...)``. Such an instance gets its class's own forward, in
which that name stands for the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_qk_rope
from chronicals.models.rebinding import rebound
from chronicals.patching.forms import VALUE_TOLERANCE, Form

KERNEL = "fused_qk_rope"
ROTATION_ARGUMENTS = ["q", "k", "cos", "sin"]
"""First arguments of a rotation."""

HEAD_WIDTH = 16
"""Width of the heads on which a rotation is proved."""

Arrangement = Callable[[Tensor], Tensor]


def _unchanged(x: Tensor) -> Tensor:
    return x


def _pairs_apart(x: Tensor) -> Tensor:
    """Return channels (a0, b0, a1, b1, ...) in the order (a0, a1, ..., b0, b1, ...)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@dataclass(frozen=True)
class Rotation:
    """A rotation of a modelling file, expressed by the kernel.

    Attributes:
        share: width of its tables as a share of a head's width.
        interleaved: whether the channels of a pair are neighbours.
        table: makes the kernel's table of the file's.
        heads: makes the kernel's heads of the file's.
    """

    share: float
    interleaved: bool
    table: Arrangement = _unchanged
    heads: Arrangement = _unchanged

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, rotated by the kernel."""
        tables = self.table(cos), self.table(sin)
        return fused_qk_rope(self.heads(q), self.heads(k), *tables, interleaved=self.interleaved)


LAID = "laid end to end"
"""Name of the rotation whose tables have one channel for each pair."""

ROTATIONS: dict[str, Rotation] = {
    "": Rotation(1.0, False),
    "interleaved": Rotation(1.0, True),
    "interleaved, of the first half": Rotation(
        1.0, True, lambda x: x[..., : x.shape[-1] // 2].repeat_interleave(2, -1)
    ),
    "interleaved, a channel twice": Rotation(0.5, True, lambda x: x.repeat_interleave(2, -1)),
    LAID: Rotation(0.5, False, lambda x: torch.cat((x, x), -1)),
    "pairs apart": Rotation(1.0, False, heads=_pairs_apart),
    "pairs apart, of the first half": Rotation(
        1.0, False, lambda x: torch.cat((x[..., : x.shape[-1] // 2],) * 2, -1), _pairs_apart
    ),
}


def recognise_rotary(module: nn.Module) -> Form | None:
    """Return the form of an attention module that rotates as the kernel can; else None."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    kernels: dict[str, Callable] = {}
    names: list[str] = []
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if not isinstance(function, FunctionType):
            continue
        if list(inspect.signature(function).parameters)[:4] != ROTATION_ARGUMENTS:
            continue
        kind = next((kind for kind, way in ROTATIONS.items() if _equal(function, way)), None)
        if kind is None:
            return None
        kernels[name] = partial(_rotate, function, ROTATIONS[kind])
        names.append(f"{KERNEL}, {kind}" if kind else KERNEL)
    if not kernels:
        return None
    replaced = rebound(type(module).forward, kernels, "rotary")  # type: ignore[arg-type]
    return None if replaced is None else Form("; ".join(dict.fromkeys(names)), replaced)


def _equal(own: Callable, way: Rotation) -> bool:
    """Return whether two rotations give the same on random tensors and tables, with gradients."""
    q, k = (torch.randn(2, heads, 5, HEAD_WIDTH, requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.randn(2, 5, int(HEAD_WIDTH * way.share)) for _ in range(2))
    results = []
    for function in (own, way):
        try:
            out = function(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # it takes other tensors than these
        upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(4)) for x in out]
        results.append([*out, *torch.autograd.grad(out, (q, k), upstream)])
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= VALUE_TOLERANCE * a.abs().max())
        for a, b in zip(*results)
    )


def _rotate(
    own: Callable,
    way: Rotation,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate by the kernel; for unusual arguments call ``own``, the rotation of the file."""
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
