"""cuDNN's variable-length attention, through torch's own operators, which have no autograd for it.

Shapes: q ``[T, H, D]``, k and v ``[T, K, D]``, log-sum-exp fp32 ``[T, H, 1]``. Rows must lie densely: torch computes cuDNN's
offsets as ``cu_seqlens · heads · D``, in int32. cuDNN makes a plan for every count of documents and bound on their
length, so both go up to the next power of two; the documents that are too many are empty ones at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from chronicals.attention.support import HALVES, Backend, Support

SHORTEST = 128
"""Bounds on the length are rounded up to at least this."""

LARGEST = 2**31 - 1


@cache
def available() -> bool:
    return torch.backends.cudnn.is_available()


def _kernels() -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    return torch.ops.aten._cudnn_attention_forward.default, torch.ops.aten._cudnn_attention_backward.default


def power_of_two(number: int, least: int = 1) -> int:
    """The next power of two that is not below ``number`` or ``least``."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def rounded_up(cu: Tensor, longest: int) -> tuple[Tensor, int]:
    """Bounds of so many documents, and a bound on their length, as plans are made for."""
    missing = power_of_two(cu.shape[0] - 1) - (cu.shape[0] - 1)
    padded = torch.cat((cu, cu[-1:].expand(missing))) if missing else cu
    return padded, power_of_two(longest, SHORTEST)


@torch.library.custom_op("chronicals::cudnn_attention_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    cu, longest = rounded_up(cu, longest)
    q, k, v = (x.contiguous() for x in (q, k, v))
    forward, _ = _kernels()
    out, lse, *_ = forward(q, k, v, None, cu, cu, longest, longest, True, 0.0, True, False, scale=scale)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((*q.shape[:2], 1), dtype=torch.float32)


@torch.library.custom_op("chronicals::cudnn_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    cu, longest = rounded_up(cu, longest)
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset: there is no dropout
    _, backward = _kernels()
    return backward(dout, q, k, v, out, lse, unused, unused, None, cu, cu, longest, longest, 0.0, True, scale=scale)


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu, *options = inputs
    ctx.save_for_backward(q, k, v, *output, cu)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 6
    return (*_backward(dout, *ctx.saved_tensors, *ctx.options), None, None, None)


_forward.register_autograd(_gradients, setup_context=_save)


def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, *_: object) -> Tensor:
    if q.numel() > LARGEST:
        raise ValueError(f"q has {q.numel()} elements, cuDNN counts to {LARGEST}; use fewer tokens or another backend")
    return _forward(q, k, v, cu, longest, scale)[0]


BACKEND = Backend(
    attend,
    {"cuda": Support(HALVES, {9: 256, 10: 128}, multiple=8, window=False, softcap=False, sinks=False)},
    available,
    "a torch built with cuDNN",
)
