"""Rotary position embedding (Su et al., 2021, section 3.4.2) of queries and keys, both in one launch.

Channels are rotated in pairs (a, b): (i, i + R/2) in the half layout of transformers, (2i, 2i + 1) interleaved.

    a' = a · cos_a − b · sin_a          da = da' · cos_a + db' · sin_b
    b' = b · cos_b + a · sin_b          db = db' · cos_b − da' · sin_a

Tables may be narrower than the head: the channels beyond are left alone (partial rotary). Nothing but the tables is
saved. Bytes a token in 16 bit: 4 · (H + K) · D each way; the tables stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import next_power_of_2, runs_triton, tl, triton


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, x_head, out_head, a, b, cos_a, cos_b, sin_a, sin_b, half, width,
    HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """All heads of one token of one tensor; ``REST`` channels (rounded up) behind the rotated ones are copied."""
    head = tl.arange(0, PADDED)[:, None]
    inside = (head < HEADS) & (tl.arange(0, HALF) < half)[None, :]
    first = tl.load(x_ptr + head * x_head + a[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + head * x_head + b[None, :], mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        turned_first, turned_second = first * cos_a + second * sin_b, second * cos_b - first * sin_a
    else:
        turned_first, turned_second = first * cos_a - second * sin_a, second * cos_b + first * sin_b
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + head * out_head + a[None, :], turned_first.to(kind), mask=inside)
    tl.store(out_ptr + head * out_head + b[None, :], turned_second.to(kind), mask=inside)
    if REST:
        rest = 2 * half + tl.arange(0, REST)
        there = (head < HEADS) & (rest < width)[None, :]
        kept = tl.load(x_ptr + head * x_head + rest[None, :], mask=there)
        tl.store(out_ptr + head * out_head + rest[None, :], kept, mask=there)


@triton.jit
def _qk_rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, length, half, width,
    q_batch, q_token, q_head, k_batch, k_token, k_head, q_out_batch, q_out_token, q_out_head,
    k_out_batch, k_out_token, k_out_head, table_batch, table_token,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // length
    batch, token = row.to(tl.int64), (tl.program_id(0) - row * length).to(tl.int64)
    i = tl.arange(0, HALF)
    a, b = (2 * i, 2 * i + 1) if INTERLEAVED else (i, i + half)
    table = batch * table_batch + token * table_token
    cos_a = tl.load(cos_ptr + table + a, mask=i < half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + table + b, mask=i < half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + table + a, mask=i < half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + table + b, mask=i < half, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        q_ptr + batch * q_batch + token * q_token, q_out_ptr + batch * q_out_batch + token * q_out_token,
        q_head, q_out_head, a, b, cos_a, cos_b, sin_a, sin_b, half, width, Q_HEADS, Q_PADDED, HALF, REST, INVERSE,
    )  # fmt: skip
    if K_HEADS:
        _rotate_heads(
            k_ptr + batch * k_batch + token * k_token, k_out_ptr + batch * k_out_batch + token * k_out_token,
            k_head, k_out_head, a, b, cos_a, cos_b, sin_a, sin_b, half, width, K_HEADS, K_PADDED, HALF, REST, INVERSE,
        )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor | None, q_out: Tensor, k_out: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool,
    inverse: bool,
) -> None:  # fmt: skip
    """One program a token; all tensors ``[B, H, S, D]`` with dense channels, tables ``[1 or B, S, R]``."""
    batch, heads, length, width = q.shape
    if not q.numel():
        return
    strides = [s for x in (q, k, q_out, k_out) for s in ((0, 0, 0) if x is None else (x.stride(0), x.stride(2), x.stride(1)))]
    half, k_heads = cos.shape[-1] // 2, 0 if k is None else k.shape[1]
    copied = 0 if q.data_ptr() == q_out.data_ptr() else width - 2 * half
    _qk_rope_kernel[(batch * length,)](
        q, k, q_out, k_out, cos, sin, length, half, width, *strides, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        heads, next_power_of_2(heads), k_heads, next_power_of_2(max(k_heads, 1)), next_power_of_2(half),
        next_power_of_2(copied) if copied else 0, interleaved, inverse,
        num_warps=min(8, max(1, next_power_of_2((heads + k_heads) * half) // 512)),
    )  # fmt: skip


@torch.library.custom_op("chronicals::qk_rope", mutates_args=())
def _rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = _dense(q), _dense(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _launch(q, k, q_out, k_out, cos, sin, interleaved, inverse)
    return q_out, k_out


@_rotate_both.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_dense(q)), torch.empty_like(_dense(k))


@torch.library.custom_op("chronicals::rope_", mutates_args=("x",))
def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> None:
    dense = _dense(x)
    _launch(dense, None, dense, None, cos, sin, interleaved, inverse)
    if dense is not x:
        x.copy_(dense)


@_rotate_in_place.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> None:
    return None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _apply(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Of one tensor ``[B, H, S, D]``, by the reference where no kernel runs."""
    if not runs_triton(x, cos, sin):
        return _rotate(x, cos, sin, interleaved, inverse)
    out = x.clone()
    _rotate_in_place(out, cos, sin, interleaved, inverse)
    return out


class _RotationOfBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate_both(q, k, cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_rotate_both(d_q, d_k, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


class _RotationInPlace(torch.autograd.Function):
    """Of one tensor: autograd lets a function overwrite a view, as q and k of a model are, only if that is its one output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.mark_dirty(x)
        if runs_triton(x, cos, sin):
            _rotate_in_place(x, cos, sin, interleaved, False)
            return x
        return x.copy_(_rotate(x, cos, sin, interleaved))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _apply(upstream, cos, sin, ctx.interleaved, inverse=True), None, None, None


def fused_qk_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool = False, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q, k: ``[B, H, S, D]``, or packed ``[T, H, D]``; the number of heads may differ.
        cos, sin: ``[B, S, R]`` (``B`` may be 1), or packed ``[T, R]``; R ≤ D, filled over all R channels as
            transformers does.
        in_place: overwrite ``q`` and ``k``; they are what is returned.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).

    Raises:
        ValueError: shapes do not fit each other.
    """
    check_rope(q, k, cos, sin)
    packed = q.ndim == 3
    of_q, of_k = (x.transpose(0, 1)[None] if packed else x for x in (q, k))
    cos, sin = (table[None] if packed else table for table in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if in_place:
        of_q, of_k = (_RotationInPlace.apply(x, cos, sin, interleaved) for x in (of_q, of_k))
    elif runs_triton(q, k, cos, sin):
        of_q, of_k = _RotationOfBoth.apply(of_q, of_k, cos, sin, interleaved)
    else:
        of_q, of_k = (_rotate(x, cos, sin, interleaved) for x in (of_q, of_k))
    return (of_q[0].transpose(0, 1), of_k[0].transpose(0, 1)) if packed else (of_q, of_k)


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError unless the shapes fit each other."""
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


def qk_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.ndim == 4:
        return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)
    of_q, of_k = (_rotate(x.transpose(0, 1), cos, sin, interleaved).transpose(0, 1) for x in (q, k))
    return of_q, of_k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
    """``x`` ``[..., H, S, D]``, tables ``[..., S, R]``."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    wide = turned.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = (table.to(wide.dtype).unsqueeze(-3) for table in (cos, sin))
    swapped = _swap(wide * sin, interleaved, sign=-1) if inverse else _swap(wide, interleaved) * sin
    return torch.cat(((wide * cos + swapped).to(x.dtype), rest), -1)


def _swap(x: Tensor, interleaved: bool, sign: int = 1) -> Tensor:
    """(a, b) of each pair becomes (−b, a), times ``sign``."""
    if interleaved:
        return torch.stack((-sign * x[..., 1::2], sign * x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-sign * second, sign * first), -1)
