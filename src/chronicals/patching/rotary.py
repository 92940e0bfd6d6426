"""Rotary embedding: attention modules whose forward calls ``apply_rotary_pos_emb`` of their modelling file.

Such an instance gets its class's own forward, in which that one name means the kernel: the code object is the class's,
its globals a copy with the name replaced. No source is read and no class or module is written to.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_qk_rope
from chronicals.patching.forms import TOLERANCE, Form

NAME = "apply_rotary_pos_emb"
ARGUMENTS = ["q", "k", "cos", "sin"]


Table = Callable[[Tensor], Tensor]

TABLES: dict[str, tuple[float, bool, Table]] = {
    "": (1.0, False, lambda table: table),
    "interleaved": (1.0, True, lambda table: table),
    "interleaved, of the first half": (1.0, True, lambda table: table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)),
    "interleaved, a channel twice": (0.5, True, lambda table: table.repeat_interleave(2, -1)),
    "laid end to end": (0.5, False, lambda table: torch.cat((table, table), -1)),
}
"""Ways to rotate: the tables' width in those of a head, whether pairs lie side by side, and the table the kernel takes."""


def recognise_rotary(module: nn.Module) -> Form | None:
    """The form of an attention module that rotates queries and keys as the kernel does, or None."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or NAME not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(NAME)
    if own is None or list(inspect.signature(own).parameters)[:4] != ARGUMENTS:
        return None
    for way, (share, interleaved, table) in TABLES.items():
        if _equal(own, share, interleaved, table):
            by = f"fused_qk_rope, {way}" if way else "fused_qk_rope"
            return Form(by, _with_rotation(forward, _rotation(own, way)))
    return None


def _equal(own: Callable, share: float, interleaved: bool, table: Table) -> bool:
    """On random tensors and tables, forward and backward."""
    q, k = (torch.randn(2, heads, 5, 16, requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.randn(2, 5, int(16 * share)) for _ in range(2))
    found = []
    for function in (own, lambda q, k, cos, sin: fused_qk_rope(q, k, table(cos), table(sin), interleaved=interleaved)):
        try:
            out = function(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # it wants other tensors than these
        upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(4)) for x in out]
        found.append([*out, *torch.autograd.grad(out, (q, k), upstream)])
    return all(a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * a.abs().max()) for a, b in zip(*found))


def _rotation(own: Callable, way: str) -> Callable:
    _, interleaved, table = TABLES[way]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        usual = not rest and not options and q.ndim == 4 and cos.ndim == 3 and q.dtype == k.dtype == cos.dtype
        if not usual or cos.device != q.device:
            return own(q, k, cos, sin, *rest, **options)
        return fused_qk_rope(q, k, table(cos), table(sin), interleaved=interleaved)

    rotate.__name__ = way or "half"
    return rotate


def _with_rotation(forward: FunctionType, rotate: Callable) -> Callable:
    made = FunctionType(
        forward.__code__, _globals_with(forward, rotate), forward.__name__, forward.__defaults__, forward.__closure__
    )  # fmt: skip
    made.__kwdefaults__, made.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    made.__annotations__ = forward.__annotations__
    return made


def _globals_with(forward: FunctionType, rotate: Callable) -> dict[str, Any]:
    """The globals of ``forward`` with the rotation replaced, as those of a module: ``torch.compile`` looks them up there."""
    name = f"chronicals.patching.rotary.{forward.__module__}.{rotate.__name__}"
    if name not in sys.modules:
        module = ModuleType(name)
        vars(module).update(forward.__globals__, __name__=name, **{NAME: rotate})
        sys.modules[name] = module
    return vars(sys.modules[name])
