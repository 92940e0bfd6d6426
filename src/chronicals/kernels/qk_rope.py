"""Rotary position embedding (Su et al., 2021, section 3.4.2) of queries and keys, in the half layout of transformers.

With ``x = (a, b)`` the halves of the rotated channels: ``(a·cos − b·sin, b·cos + a·sin)``. Tables may be narrower than
the head: the channels beyond are left alone (partial rotary). The inverse is the rotation by −sin, so nothing but the
tables is saved for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor


def fused_qk_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q, k: ``[B, H, S, D]``, or packed ``[T, H, D]``; the number of heads may differ.
        cos, sin: ``[B, S, R]`` (``B`` may be 1), or packed ``[T, R]``; R ≤ D, both halves filled as transformers does.
        in_place: overwrite ``q`` and ``k``; they are what is returned.

    Raises:
        ValueError: shapes do not fit each other.
    """
    if q.ndim not in (3, 4) or cos.ndim != q.ndim - 1 or cos.shape != sin.shape or k.ndim != q.ndim:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: expected "
            "[B, H, S, D] with tables [B, S, R], or [T, H, D] with tables [T, R]"
        )
    if cos.shape[-1] > q.shape[-1] or cos.shape[-1] % 2:
        raise ValueError(f"cos is {cos.shape[-1]} wide: must be even and at most the head's {q.shape[-1]}")
    rows = (q.shape[0], q.shape[2]) if q.ndim == 4 else q.shape[:1]
    apart = (k.shape[0], *k.shape[2:]) if k.ndim == 4 else (k.shape[0], k.shape[2])
    if apart != (*rows, q.shape[-1]) or cos.shape[-2] != rows[-1] or (q.ndim == 4 and cos.shape[0] not in (1, rows[0])):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} do not fit each other")
    return _Rotation.apply(q, cos, sin, in_place), _Rotation.apply(k, cos, sin, in_place)


class _Rotation(torch.autograd.Function):
    """Of one tensor: autograd lets a function overwrite a view, as q and k of a model are, only if that is its one output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        rotated = _rotate(x, *_over_heads(cos, sin))
        if not in_place:
            return rotated
        ctx.mark_dirty(x)
        return x.copy_(rotated)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(upstream, *_over_heads(cos, -sin)), None, None, None


def qk_rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _over_heads(cos, sin)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _over_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    heads = 1 if cos.ndim == 3 else -2
    return cos.unsqueeze(heads), sin.unsqueeze(heads)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    wide = turned.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, -1)
    result = wide * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((result.to(x.dtype), rest), -1)
