"""RMSNorm of every query and key head, then rotary position embedding: both for q and k in one launch (Qwen3, Gemma 3).

Of one head's row x of D channels, with the weight w and the tables of its token:

    n = x̂ · (offset + w),   x̂ = x · rstd,   rstd = 1 / sqrt(mean(x²) + eps)
    a' = a · cos_a − b · sin_a,   b' = b · cos_b + a · sin_b      for the pairs (a, b) of n; the other channels stay n
    g: g_a = da' · cos_a + db' · sin_b,   g_b = db' · cos_b − da' · sin_a
    dx = rstd · (h − x̂ · mean(h · x̂)),   h = g · (offset + w);   dw = Σ_heads g · x̂

Pairs are (i, i + R/2) in the half layout of transformers, (2i, 2i + 1) interleaved; tables may be narrower than the head
(R < D). All is computed in fp32 and rounded once, at the end. ``offset`` is 1 where a model stores w − 1 (Gemma).
Saved: q and k as they came, the weights, the tables and one fp32 a head.
Bytes a token in 16 bit: 4 · (H + K) · D forward, 6 · (H + K) · D backward; tables and weights stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import WIDEST, Tile, multiprocessors, next_power_of_2, runs_triton, tl, triton
from chronicals.kernels.qk_rope import check_rope, qk_rope_reference
from chronicals.kernels.rmsnorm import rmsnorm_reference

WARPS_A_PROCESSOR = 32


def _tile(heads: int, width: int, backward: bool) -> Tile:
    """Tokens a program, the elements of the larger of q and k of one token, and 16 to 32 of them a thread."""
    block = next_power_of_2(heads) * next_power_of_2(width)
    tokens = max(1, (2048 if backward else 4096) // block)
    return Tile(tokens, block, warps=min(16, max(4, tokens * block // (512 if backward else 1024))))


@triton.jit
def _load_pairs(at, inside, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """In fp32 the channels a and b of all pairs, of the rows that begin ``at`` ``[tokens, heads, 1]``."""
    if INTERLEAVED:  # neighbours are loaded together and parted in registers
        column = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(at + column, mask=inside & (column < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)[None, None, :]
        there = inside & (column < HALF)
        a = tl.load(at + column, mask=there, other=0.0).to(tl.float32)
        b = tl.load(at + (column + HALF), mask=there, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _load_heads(
    at, inside, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Pairs, and the ``REST`` channels (rounded up) behind them, which are not rotated."""
    a, b = _load_pairs(at, inside, HALF, BLOCK, INTERLEAVED)
    rest = 0.0
    if REST:
        column = 2 * HALF + tl.arange(0, REST)[None, None, :]
        rest = tl.load(at + column, mask=inside & (column < WIDTH), other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def _store_heads(
    at, a, b, rest, inside, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    kind = at.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * BLOCK))
        tl.store(at + column, both.to(kind), mask=inside & (column < 2 * HALF))
    else:
        column = tl.arange(0, BLOCK)[None, None, :]
        there = inside & (column < HALF)
        tl.store(at + column, a.to(kind), mask=there)
        tl.store(at + (column + HALF), b.to(kind), mask=there)
    if REST:
        column = 2 * HALF + tl.arange(0, REST)[None, None, :]
        tl.store(at + column, rest.to(kind), mask=inside & (column < WIDTH))


@triton.jit
def _forward_of_heads(
    a, b, rest, w_at, y_at, rstd_at, inside, cos_a, cos_b, sin_a, sin_b, eps, offset,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    w_a, w_b, w_rest = _load_heads(w_at, tl.full((1, 1, 1), 1, tl.int1), WIDTH, HALF, BLOCK, REST, INTERLEAVED)
    squares = tl.sum(a * a + b * b, axis=2, keep_dims=True)
    if REST:
        squares += tl.sum(rest * rest, axis=2, keep_dims=True)
    rstd = 1.0 / tl.sqrt_rn(squares / WIDTH + eps)
    tl.store(rstd_at, rstd, mask=inside)
    a *= rstd * (w_a + offset)
    b *= rstd * (w_b + offset)
    rest *= rstd * (w_rest + offset)
    _store_heads(
        y_at, a * cos_a - b * sin_a, b * cos_b + a * sin_b, rest, inside, WIDTH, HALF, BLOCK, REST, INTERLEAVED
    )  # fmt: skip


@triton.jit
def _backward_of_heads(
    dy_a, dy_b, g_rest, a, b, rest, rstd, w_at, dx_at, inside, cos_a, cos_b, sin_a, sin_b, offset, dw_a, dw_b, dw_rest,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    WANTS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The sums for the gradient of the weight, with these heads' part added."""
    w_a, w_b, w_rest = _load_heads(w_at, tl.full((1, 1, 1), 1, tl.int1), WIDTH, HALF, BLOCK, REST, INTERLEAVED)
    g_a = dy_a * cos_a + dy_b * sin_b
    g_b = dy_b * cos_b - dy_a * sin_a
    a *= rstd
    b *= rstd
    rest *= rstd
    if WANTS_WEIGHTS:
        dw_a += g_a * a
        dw_b += g_b * b
        dw_rest += g_rest * rest
    g_a *= w_a + offset
    g_b *= w_b + offset
    g_rest *= w_rest + offset
    projection = tl.sum(g_a * a + g_b * b, axis=2, keep_dims=True)
    if REST:
        projection += tl.sum(g_rest * rest, axis=2, keep_dims=True)
    projection /= WIDTH
    _store_heads(
        dx_at, rstd * (g_a - a * projection), rstd * (g_b - b * projection), rstd * (g_rest - rest * projection), inside,
        WIDTH, HALF, BLOCK, REST, INTERLEAVED,
    )  # fmt: skip
    return dw_a, dw_b, dw_rest


@triton.jit
def _qk_norm_rope_forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, rstd_ptr, tokens, length,
    q_batch, q_token, q_head, k_batch, k_token, k_head, q_out_batch, q_out_token, q_out_head,
    k_out_batch, k_out_token, k_out_head, table_batch, table_token, eps, offset,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """All is loaded before the first store, so that a program waits for the memory once."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    there = row < tokens
    batch, token = (row // length).to(tl.int64), (row % length).to(tl.int64)
    q = tl.arange(0, Q_PADDED)[None, :, None].to(tl.int64)
    k = tl.arange(0, K_PADDED)[None, :, None].to(tl.int64)
    of_q, of_k = there & (q < Q_HEADS), there & (k < K_HEADS)
    q_a, q_b, q_rest = _load_heads(
        q_ptr + batch * q_batch + token * q_token + q * q_head, of_q, WIDTH, HALF, BLOCK, REST, INTERLEAVED
    )  # fmt: skip
    k_a, k_b, k_rest = _load_heads(
        k_ptr + batch * k_batch + token * k_token + k * k_head, of_k, WIDTH, HALF, BLOCK, REST, INTERLEAVED
    )  # fmt: skip
    table = batch * table_batch + token * table_token
    cos_a, cos_b = _load_pairs(cos_ptr + table, there, HALF, BLOCK, INTERLEAVED)
    sin_a, sin_b = _load_pairs(sin_ptr + table, there, HALF, BLOCK, INTERLEAVED)
    rstd = rstd_ptr + row.to(tl.int64) * (Q_HEADS + K_HEADS)
    _forward_of_heads(
        q_a, q_b, q_rest, q_weight_ptr, q_out_ptr + batch * q_out_batch + token * q_out_token + q * q_out_head,
        rstd + q, of_q, cos_a, cos_b, sin_a, sin_b, eps, offset, WIDTH, HALF, BLOCK, REST, INTERLEAVED,
    )  # fmt: skip
    _forward_of_heads(
        k_a, k_b, k_rest, k_weight_ptr, k_out_ptr + batch * k_out_batch + token * k_out_token + k * k_out_head,
        rstd + Q_HEADS + k, of_k, cos_a, cos_b, sin_a, sin_b, eps, offset, WIDTH, HALF, BLOCK, REST, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _qk_norm_rope_backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dq_ptr, dk_ptr,
    shares_ptr, tokens, length, dq_out_batch, dq_out_token, dq_out_head, dk_out_batch, dk_out_token, dk_out_head,
    q_batch, q_token, q_head, k_batch, k_token, k_head, dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head,
    table_batch, table_token, offset,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
    WANTS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """A program takes every n-th block of tokens, so that its shares of the weights' gradients stay in registers."""
    q = tl.arange(0, Q_PADDED)[None, :, None].to(tl.int64)
    k = tl.arange(0, K_PADDED)[None, :, None].to(tl.int64)
    tail: tl.constexpr = REST if REST else 1
    q_dw_a = tl.zeros((TOKENS, Q_PADDED, BLOCK), tl.float32)
    q_dw_b = tl.zeros((TOKENS, Q_PADDED, BLOCK), tl.float32)
    q_dw_rest = tl.zeros((TOKENS, Q_PADDED, tail), tl.float32)
    k_dw_a = tl.zeros((TOKENS, K_PADDED, BLOCK), tl.float32)
    k_dw_b = tl.zeros((TOKENS, K_PADDED, BLOCK), tl.float32)
    k_dw_rest = tl.zeros((TOKENS, K_PADDED, tail), tl.float32)
    for first in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        row = first + tl.arange(0, TOKENS)[:, None, None]
        there = row < tokens
        batch, token = (row // length).to(tl.int64), (row % length).to(tl.int64)
        of_q, of_k = there & (q < Q_HEADS), there & (k < K_HEADS)
        dq_a, dq_b, dq_rest = _load_heads(
            dq_out_ptr + batch * dq_out_batch + token * dq_out_token + q * dq_out_head, of_q,
            WIDTH, HALF, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip
        q_a, q_b, q_rest = _load_heads(
            q_ptr + batch * q_batch + token * q_token + q * q_head, of_q, WIDTH, HALF, BLOCK, REST, INTERLEAVED
        )  # fmt: skip
        dk_a, dk_b, dk_rest = _load_heads(
            dk_out_ptr + batch * dk_out_batch + token * dk_out_token + k * dk_out_head, of_k,
            WIDTH, HALF, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip
        k_a, k_b, k_rest = _load_heads(
            k_ptr + batch * k_batch + token * k_token + k * k_head, of_k, WIDTH, HALF, BLOCK, REST, INTERLEAVED
        )  # fmt: skip
        table = batch * table_batch + token * table_token
        cos_a, cos_b = _load_pairs(cos_ptr + table, there, HALF, BLOCK, INTERLEAVED)
        sin_a, sin_b = _load_pairs(sin_ptr + table, there, HALF, BLOCK, INTERLEAVED)
        rstd = rstd_ptr + row.to(tl.int64) * (Q_HEADS + K_HEADS)
        q_rstd = tl.load(rstd + q, mask=of_q, other=0.0)
        k_rstd = tl.load(rstd + Q_HEADS + k, mask=of_k, other=0.0)
        q_dw_a, q_dw_b, q_dw_rest = _backward_of_heads(
            dq_a, dq_b, dq_rest, q_a, q_b, q_rest, q_rstd, q_weight_ptr,
            dq_ptr + batch * dq_batch + token * dq_token + q * dq_head, of_q, cos_a, cos_b, sin_a, sin_b, offset,
            q_dw_a, q_dw_b, q_dw_rest, WIDTH, HALF, BLOCK, REST, INTERLEAVED, WANTS_WEIGHTS,
        )  # fmt: skip
        k_dw_a, k_dw_b, k_dw_rest = _backward_of_heads(
            dk_a, dk_b, dk_rest, k_a, k_b, k_rest, k_rstd, k_weight_ptr,
            dk_ptr + batch * dk_batch + token * dk_token + k * dk_head, of_k, cos_a, cos_b, sin_a, sin_b, offset,
            k_dw_a, k_dw_b, k_dw_rest, WIDTH, HALF, BLOCK, REST, INTERLEAVED, WANTS_WEIGHTS,
        )  # fmt: skip
    if WANTS_WEIGHTS:
        share = shares_ptr + tl.program_id(0).to(tl.int64) * 2 * WIDTH
        _store_sums(share, q_dw_a, q_dw_b, q_dw_rest, WIDTH, HALF, BLOCK, REST, INTERLEAVED)
        _store_sums(share + WIDTH, k_dw_a, k_dw_b, k_dw_rest, WIDTH, HALF, BLOCK, REST, INTERLEAVED)


@triton.jit
def _store_sums(
    at, a, b, rest, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Over tokens and heads."""
    i = tl.arange(0, BLOCK)
    scale: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    tl.store(at + i * scale, tl.sum(tl.sum(a, axis=1), axis=0), mask=i < HALF)
    tl.store(at + i * scale + apart, tl.sum(tl.sum(b, axis=1), axis=0), mask=i < HALF)
    if REST:
        column = 2 * HALF + tl.arange(0, REST)
        tl.store(at + column, tl.sum(tl.sum(rest, axis=1), axis=0), mask=column < WIDTH)


def _shape(q: Tensor, k: Tensor, cos: Tensor, interleaved: bool, tile: Tile) -> tuple[int | bool, ...]:
    """The constants of both kernels."""
    half, rest = cos.shape[-1] // 2, q.shape[-1] - cos.shape[-1]
    heads = (n for x in (q, k) for n in (x.shape[1], next_power_of_2(x.shape[1])))
    return *heads, q.shape[-1], half, next_power_of_2(half), next_power_of_2(rest) if rest else 0, interleaved, tile.rows


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, token and head of ``[B, H, S, D]``."""
    return [x.stride(dim) for x in tensors for dim in (0, 2, 1)]


def _table_strides(cos: Tensor) -> tuple[int, int]:
    return cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


@torch.library.custom_op("chronicals::qk_norm_rope_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q and k as they come out, and rstd ``[B, S, H + K]``; q and k ``[B, H or K, S, D]`` with dense channels."""
    q_out, k_out, rstd = _outputs(q, k)
    tokens, length = q.shape[0] * q.shape[2], q.shape[2]
    if tokens:
        tile = _tile(max(q.shape[1], k.shape[1]), q.shape[-1], backward=False)
        _qk_norm_rope_forward_kernel[(triton.cdiv(tokens, tile.rows),)](
            q, k, q_weight, k_weight, cos, sin, q_out, k_out, rstd, tokens, length, *_strides(q, k, q_out, k_out),
            *_table_strides(cos), eps, offset, *_shape(q, k, cos, interleaved, tile), num_warps=tile.warps,
        )  # fmt: skip
    return q_out, k_out, rstd


def _outputs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rstd = q.new_empty((q.shape[0], q.shape[2], q.shape[1] + k.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), rstd


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(q, k)


@torch.library.custom_op("chronicals::qk_norm_rope_backward", mutates_args=())
def _backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, offset: float, interleaved: bool, wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, and in fp32 the gradients of both weights ``[2, D]``, or ``[0, D]`` where they are not wanted."""
    tokens, length = q.shape[0] * q.shape[2], q.shape[2]
    tile = _tile(max(q.shape[1], k.shape[1]), q.shape[-1], backward=True)
    programs = min(triton.cdiv(tokens, tile.rows), multiprocessors(q.device) * max(1, WARPS_A_PROCESSOR // tile.warps))
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    shares = q.new_empty((programs, 2 * wants_weights, q.shape[-1]), dtype=torch.float32)
    if tokens:
        _qk_norm_rope_backward_kernel[(programs,)](
            dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, rstd, dq, dk, shares, tokens, length,
            *_strides(dq_out, dk_out, q, k, dq, dk), *_table_strides(cos), offset,
            *_shape(q, k, cos, interleaved, tile), wants_weights, num_warps=tile.warps,
        )  # fmt: skip
    return dq, dk, shares.sum(0)


@_backward.register_fake
def _(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, offset: float, interleaved: bool, wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), q.new_empty((2 * wants_weights, q.shape[-1]), dtype=torch.float32)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
        offset: float, interleaved: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        taken = _dense(q), _dense(k), q_weight.contiguous(), k_weight.contiguous(), cos, sin
        q_out, k_out, rstd = _forward(*taken, eps, offset, interleaved)
        ctx.save_for_backward(*taken, rstd)
        ctx.offset, ctx.interleaved = offset, interleaved
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, wanted = ctx.saved_tensors[2:4], ctx.needs_input_grad[2:4]
        given = _dense(dq_out), _dense(dk_out), *ctx.saved_tensors
        dq, dk, sums = _backward(*given, ctx.offset, ctx.interleaved, any(wanted))
        of_weights = (dw.to(w.dtype) for dw, w in zip(sums.unbind(0), weights)) if any(wanted) else (None, None)
        return dq, dk, *of_weights, *(None,) * 5


def fused_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    offset: float = 0.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm of every head of queries and keys with ``offset + weight``, then rotation by the angles of their positions.

    Args:
        q, k: ``[B, H, S, D]``, or packed ``[T, H, D]``; the number of heads may differ.
        q_weight, k_weight: ``[D]``.
        cos, sin: ``[B, S, R]`` (``B`` may be 1), or packed ``[T, R]``; R ≤ D, filled over all R channels as
            transformers does. They get no gradient.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).

    Returns:
        Queries and keys, each in its own type.

    Raises:
        ValueError: shapes do not fit each other.
    """
    check_rope(q, k, cos, sin)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != q.shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, q {tuple(q.shape)}: it must be [{q.shape[-1]}]")
    cos, sin = cos.detach(), sin.detach()
    held = max(next_power_of_2(x.shape[-2 if x.ndim == 3 else 1]) for x in (q, k)) * next_power_of_2(q.shape[-1])
    if not runs_triton(q, k, q_weight, k_weight, cos, sin) or held > WIDEST:
        return qk_norm_rope_reference(q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved)
    packed = q.ndim == 3
    of_q, of_k = (x.transpose(0, 1)[None] if packed else x for x in (q, k))
    cos, sin = (table[None] if packed else table for table in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    of_q, of_k = _QKNormRope.apply(of_q, of_k, q_weight, k_weight, cos, sin, eps, offset, interleaved)
    return (of_q[0].transpose(0, 1), of_k[0].transpose(0, 1)) if packed else (of_q, of_k)


def qk_norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    offset: float = 0.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    normalised_q, normalised_k = (
        rmsnorm_reference(x.to(torch.promote_types(x.dtype, torch.float32)), weight, eps, offset)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    of_q, of_k = qk_rope_reference(normalised_q, normalised_k, cos, sin, interleaved)
    return of_q.to(q.dtype), of_k.to(k.dtype)
