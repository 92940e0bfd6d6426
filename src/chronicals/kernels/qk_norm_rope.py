"""RMSNorm of every query and key head, then rotary position embedding, in one launch.

Qwen3 and Gemma 3 do this.

For one head's row x of D channels, the weight w and the tables of its token:

    n = x̂ · (offset + w),   x̂ = x · rstd,   rstd = 1 / sqrt(mean(x²) + eps)
    a' = a · cos_a − b · sin_a,   b' = b · cos_b + a · sin_b      for the pairs (a, b) of n; the other channels stay n
    g: g_a = da' · cos_a + db' · sin_b,   g_b = db' · cos_b − da' · sin_a
    dx = rstd · (h − x̂ · mean(h · x̂)),   h = g · (offset + w);   dw = Σ_heads g · x̂

Pairs are (i, i + R/2) in the half layout of transformers, (2i, 2i + 1) if interleaved; tables may
be narrower than the head (R < D). Everything is computed in fp32 and rounded once, at the end.
``offset`` is 1 for models that store w − 1 (Gemma), else 0. Saved for backward: the inputs and one
fp32 a head. Bytes a token in 16 bit: 4 · (H + K) · D forward, 6 · (H + K) · D backward; tables and
weights stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Amax, magnitude, new_amax, raise_amax, with_amax
from chronicals.kernels.launch import (
    MAX_ROW_WIDTH,
    Tile,
    differentiable_once,
    multiprocessors,
    next_power_of_2,
    operator,
    own_tensor,
    runs_triton,
    tl,
    triton,
)
from chronicals.kernels.qk_rope import (
    check_rope,
    copy_heads,
    dense,
    gradient_like,
    heads_after,
    heads_of,
    load_pairs,
    load_turn,
    qk_rope_reference,
    store_pairs,
    strides_of,
)
from chronicals.kernels.rmsnorm import rmsnorm_reference

QK_NORM_ROPE_BACKWARD_WARPS = 16
"""Warps on a multiprocessor in the backward pass; they set the number of programs.

Few, since each thread holds its share of the weights' gradients and two loads in registers.
"""


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, interleaved: bool, backward: bool
) -> tuple[Tile, tuple[int | bool, ...]]:
    """Return the tile, and the compile-time arguments that both kernels share."""
    half = cos.shape[-1] // 2
    behind = q.shape[-1] - cos.shape[-1]
    rest = next_power_of_2(behind) if behind else 0
    # 8 pairs a thread. Measured forward on an H200 at head widths 64, 128 and 256: 0.78 of the
    # copy rate each; 16 pairs a thread reach 0.55.
    block = next_power_of_2(half)
    tile = Tile(16, block, warps=min(8, max(1, block // 16)))
    if backward:
        tile = Tile(max(1, min(64, 1024 // max(block, rest // 2))), block, warps=4)
    return tile, (
        q.shape[1],
        k.shape[1],
        tile.rows,
        q.shape[-1],
        half,
        tile.block,
        rest,
        interleaved,
    )


@triton.jit
def _load_rest(at, inside, WIDTH: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    """Load the channels behind the pairs in fp32; ``REST`` is their number, padded."""
    column = 2 * HALF + tl.arange(0, REST)[None, :]
    return tl.load(at + column, mask=inside & (column < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _store_rest(at, rest, inside, WIDTH: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    column = 2 * HALF + tl.arange(0, REST)[None, :]
    tl.store(at + column, rest.to(at.dtype.element_ty), mask=inside & (column < WIDTH))


@triton.jit
def _load_weight(w_ptr, offset, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    a, b = load_pairs(w_ptr, tl.full((1, 1), 1, tl.int1), HALF, BLOCK, INTERLEAVED)
    return a.to(tl.float32) + offset, b.to(tl.float32) + offset


@triton.jit
def _forward_of_heads(
    # read
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    # written
    y_ptr,
    rstd_ptr,
    # the heads of this program
    first,
    positions,
    length,
    # strides, in elements
    x_batch,
    x_token,
    x_head,
    y_batch,
    y_token,
    y_head,
    table_batch,
    table_token,
    # numbers of the formula
    eps,
    offset,
    # shapes, tile and layout
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    inside, batch, token, head = heads_after(first, positions, length, HEADS, ROWS)
    x_ptr += batch * x_batch + token * x_token + head * x_head
    y_ptr += batch * y_batch + token * y_token + head * y_head
    table = batch * table_batch + token * table_token
    a, b = load_pairs(x_ptr, inside, HALF, BLOCK, INTERLEAVED)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    cos_a, cos_b, sin_a, sin_b = load_turn(
        cos_ptr + table, sin_ptr + table, inside, HALF, BLOCK, INTERLEAVED
    )
    w_a, w_b = _load_weight(w_ptr, offset, HALF, BLOCK, INTERLEAVED)
    squares = tl.sum(a * a + b * b, axis=1, keep_dims=True)
    if REST:
        rest = _load_rest(x_ptr, inside, WIDTH, HALF, REST)
        squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    rstd = 1.0 / tl.sqrt_rn(squares / WIDTH + eps)
    tl.store(rstd_ptr + first + tl.arange(0, ROWS)[:, None], rstd, mask=inside)
    a *= rstd * w_a
    b *= rstd * w_b
    store_pairs(
        y_ptr, a * cos_a - b * sin_a, b * cos_b + a * sin_b, inside, HALF, BLOCK, INTERLEAVED
    )
    if REST:
        rest *= rstd * (_load_rest(w_ptr, tl.full((1, 1), 1, tl.int1), WIDTH, HALF, REST) + offset)
        _store_rest(y_ptr, rest, inside, WIDTH, HALF, REST)


@triton.jit
def _qk_norm_rope_forward_kernel(
    # read
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    # written
    q_out_ptr,
    k_out_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    # tokens in all, and of a sequence
    positions,
    length,
    # strides, in elements
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    q_out_batch,
    q_out_token,
    q_out_head,
    k_out_batch,
    k_out_token,
    k_out_head,
    table_batch,
    table_token,
    # numbers of the formula
    eps,
    offset,
    # shapes, tile and layout
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Normalise and rotate queries and keys, and write rstd of each head.

    Each of ``Q_HEADS + K_HEADS`` consecutive programs takes ``ROWS`` heads of the same ``ROWS``
    positions, so these share the tables' rows in the cache.
    """
    group = tl.program_id(0) // (Q_HEADS + K_HEADS)
    member = tl.program_id(0) - group * (Q_HEADS + K_HEADS)
    if member < Q_HEADS:
        _forward_of_heads(
            q_ptr,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            q_out_ptr,
            q_rstd_ptr,
            (group * Q_HEADS + member) * ROWS,
            positions,
            length,
            q_batch,
            q_token,
            q_head,
            q_out_batch,
            q_out_token,
            q_out_head,
            table_batch,
            table_token,
            eps,
            offset,
            Q_HEADS,
            ROWS,
            WIDTH,
            HALF,
            BLOCK,
            REST,
            INTERLEAVED,
        )
    else:
        _forward_of_heads(
            k_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            k_out_ptr,
            k_rstd_ptr,
            (group * K_HEADS + member - Q_HEADS) * ROWS,
            positions,
            length,
            k_batch,
            k_token,
            k_head,
            k_out_batch,
            k_out_token,
            k_out_head,
            table_batch,
            table_token,
            eps,
            offset,
            K_HEADS,
            ROWS,
            WIDTH,
            HALF,
            BLOCK,
            REST,
            INTERLEAVED,
        )


@triton.jit
def _over_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``[ROWS, COLUMNS]`` over its rows to ``[1, COLUMNS]``."""
    # In two stages, whose rounding error is smaller than that of one.
    some: tl.constexpr = 8 if ROWS >= 8 else ROWS
    return tl.sum(tl.sum(tl.reshape(x, (ROWS // some, some, COLUMNS)), axis=1), axis=0)[None, :]


@triton.jit
def _backward_of_heads(
    # read
    dy_ptr,
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    # written
    dx_ptr,
    share_ptr,
    amax_ptr,
    # this program's number among those that share the heads
    program,
    programs,
    # tokens in all, and of a sequence
    positions,
    length,
    # strides, in elements
    dy_batch,
    dy_token,
    dy_head,
    x_batch,
    x_token,
    x_head,
    dx_batch,
    dx_token,
    dx_head,
    table_batch,
    table_token,
    # of the weight
    offset,
    # shapes, tile and layout
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    # options
    WANTS_WEIGHTS: tl.constexpr,
    HAS_AMAX: tl.constexpr,
):
    """Write dx of every ``programs``-th block of heads and this program's share of dw.

    The next block is loaded while one is reduced.
    """
    w_a, w_b = _load_weight(w_ptr, offset, HALF, BLOCK, INTERLEAVED)
    dw_a = tl.zeros((ROWS, BLOCK), tl.float32)
    dw_b = tl.zeros((ROWS, BLOCK), tl.float32)
    most = tl.zeros((ROWS,), tl.float32)
    if REST:
        w_rest = _load_rest(w_ptr, tl.full((1, 1), 1, tl.int1), WIDTH, HALF, REST) + offset
        dw_rest = tl.zeros((ROWS, REST), tl.float32)
    step = programs * ROWS
    next_inside, batch, token, head = heads_after(program * ROWS, positions, length, HEADS, ROWS)
    next_dy = dy_ptr + (batch * dy_batch + token * dy_token + head * dy_head)
    next_x = x_ptr + (batch * x_batch + token * x_token + head * x_head)
    next_g_a, next_g_b = load_pairs(next_dy, next_inside, HALF, BLOCK, INTERLEAVED)
    next_a, next_b = load_pairs(next_x, next_inside, HALF, BLOCK, INTERLEAVED)
    for first in range(program * ROWS, positions * HEADS, step):
        inside = next_inside
        dy_at = next_dy
        x_at = next_x
        dx_at = dx_ptr + (batch * dx_batch + token * dx_token + head * dx_head)
        table = batch * table_batch + token * table_token
        dy_a = next_g_a.to(tl.float32)
        dy_b = next_g_b.to(tl.float32)
        a = next_a.to(tl.float32)
        b = next_b.to(tl.float32)
        next_inside, batch, token, head = heads_after(first + step, positions, length, HEADS, ROWS)
        next_dy = dy_ptr + (batch * dy_batch + token * dy_token + head * dy_head)
        next_x = x_ptr + (batch * x_batch + token * x_token + head * x_head)
        next_g_a, next_g_b = load_pairs(next_dy, next_inside, HALF, BLOCK, INTERLEAVED)
        next_a, next_b = load_pairs(next_x, next_inside, HALF, BLOCK, INTERLEAVED)
        cos_a, cos_b, sin_a, sin_b = load_turn(
            cos_ptr + table, sin_ptr + table, inside, HALF, BLOCK, INTERLEAVED
        )
        rstd = tl.load(rstd_ptr + first + tl.arange(0, ROWS)[:, None], mask=inside, other=0.0)
        g_a = dy_a * cos_a + dy_b * sin_b
        g_b = dy_b * cos_b - dy_a * sin_a
        a *= rstd
        b *= rstd
        if WANTS_WEIGHTS:
            dw_a += g_a * a
            dw_b += g_b * b
        g_a *= w_a
        g_b *= w_b
        projection = tl.sum(g_a * a + g_b * b, axis=1, keep_dims=True)
        if REST:
            rest = _load_rest(x_at, inside, WIDTH, HALF, REST) * rstd
            g_rest = _load_rest(dy_at, inside, WIDTH, HALF, REST)
            if WANTS_WEIGHTS:
                dw_rest += g_rest * rest
            g_rest *= w_rest
            projection += tl.sum(g_rest * rest, axis=1, keep_dims=True)
        projection /= WIDTH
        d_a = rstd * (g_a - a * projection)
        d_b = rstd * (g_b - b * projection)
        store_pairs(dx_at, d_a, d_b, inside, HALF, BLOCK, INTERLEAVED)
        if HAS_AMAX:
            most = tl.maximum(most, tl.max(tl.maximum(magnitude(d_a), magnitude(d_b)), 1))
        if REST:
            d_rest = rstd * (g_rest - rest * projection)
            _store_rest(dx_at, d_rest, inside, WIDTH, HALF, REST)
            if HAS_AMAX:
                most = tl.maximum(most, tl.max(magnitude(d_rest), 1))
    if WANTS_WEIGHTS:
        one = tl.full((1, 1), 1, tl.int1)
        summed_a = _over_rows(dw_a, ROWS, BLOCK)
        summed_b = _over_rows(dw_b, ROWS, BLOCK)
        store_pairs(share_ptr, summed_a, summed_b, one, HALF, BLOCK, INTERLEAVED)
        if REST:
            _store_rest(share_ptr, _over_rows(dw_rest, ROWS, REST), one, WIDTH, HALF, REST)
    if HAS_AMAX:  # rounding the maximum gives the maximum of the rounded values that are stored
        raise_amax(amax_ptr, most.to(dx_ptr.dtype.element_ty).to(tl.float32))


@triton.jit
def _qk_norm_rope_backward_kernel(
    # read
    dq_out_ptr,
    dk_out_ptr,
    dv_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    # written
    dq_ptr,
    dk_ptr,
    dv_place_ptr,
    shares_ptr,
    amax_ptr,
    # programs for queries and for keys
    of_q,
    of_k,
    # tokens in all, and of a sequence
    positions,
    length,
    # strides, in elements
    dq_out_batch,
    dq_out_token,
    dq_out_head,
    dk_out_batch,
    dk_out_token,
    dk_out_head,
    dv_batch,
    dv_token,
    dv_head,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    dq_batch,
    dq_token,
    dq_head,
    dk_batch,
    dk_token,
    dk_head,
    place_batch,
    place_token,
    place_head,
    table_batch,
    table_token,
    # of the weights
    offset,
    # shapes, tile and layout
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    # options; V_HEADS is 0 if no values are copied
    WANTS_WEIGHTS: tl.constexpr,
    V_HEADS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_AMAX: tl.constexpr,
):
    """Write dq and dk, one share of the weights' gradients for each program, and copy dv.

    The first ``of_q`` programs take the queries, the next ``of_k`` the keys; each sums its share in
    registers. The remaining programs copy the gradient of the values to its place.
    """
    program = tl.program_id(0)
    share_ptr = shares_ptr + program.to(tl.int64) * WIDTH
    if program < of_q:
        _backward_of_heads(
            dq_out_ptr,
            q_ptr,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            q_rstd_ptr,
            dq_ptr,
            share_ptr,
            amax_ptr,
            program,
            of_q,
            positions,
            length,
            dq_out_batch,
            dq_out_token,
            dq_out_head,
            q_batch,
            q_token,
            q_head,
            dq_batch,
            dq_token,
            dq_head,
            table_batch,
            table_token,
            offset,
            Q_HEADS,
            ROWS,
            WIDTH,
            HALF,
            BLOCK,
            REST,
            INTERLEAVED,
            WANTS_WEIGHTS,
            HAS_AMAX,
        )
    elif program < of_q + of_k:
        _backward_of_heads(
            dk_out_ptr,
            k_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            k_rstd_ptr,
            dk_ptr,
            share_ptr,
            amax_ptr,
            program - of_q,
            of_k,
            positions,
            length,
            dk_out_batch,
            dk_out_token,
            dk_out_head,
            k_batch,
            k_token,
            k_head,
            dk_batch,
            dk_token,
            dk_head,
            table_batch,
            table_token,
            offset,
            K_HEADS,
            ROWS,
            WIDTH,
            HALF,
            BLOCK,
            REST,
            INTERLEAVED,
            WANTS_WEIGHTS,
            HAS_AMAX,
        )
    else:
        if V_HEADS:
            copy_heads(
                dv_ptr,
                dv_place_ptr,
                amax_ptr,
                (program - of_q - of_k) * ROWS,
                positions,
                length,
                dv_batch,
                dv_token,
                dv_head,
                place_batch,
                place_token,
                place_head,
                V_HEADS,
                ROWS,
                WIDTH,
                WHOLE,
                HAS_AMAX,
            )


@operator("chronicals::qk_norm_rope_forward")
def _forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel on q and k ``[B, H or K, S, D]`` with dense channels.

    Returns:
        Both outputs, and rstd ``[B, S, H]`` and ``[B, S, K]``.
    """
    q_out, k_out, q_rstd, k_rstd = _outputs(
        q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved
    )
    positions = q.shape[0] * q.shape[2]
    length = q.shape[2]
    if positions:
        tile, constants = _launch(q, k, cos, interleaved, backward=False)
        _qk_norm_rope_forward_kernel[
            (triton.cdiv(positions, tile.rows) * (q.shape[1] + k.shape[1]),)
        ](
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            q_out,
            k_out,
            q_rstd,
            k_rstd,
            positions,
            length,
            *strides_of(cos, q, k, q_out, k_out),
            eps,
            offset,
            *constants,
            num_warps=tile.warps,
        )
    return q_out, k_out, q_rstd, k_rstd


@torch.library.register_fake(_forward)
def _outputs(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate both outputs and both rstd."""
    q_rstd, k_rstd = (
        x.new_empty((x.shape[0], x.shape[2], x.shape[1]), dtype=torch.float32) for x in (q, k)
    )
    return torch.empty_like(q), torch.empty_like(k), q_rstd, k_rstd


@operator("chronicals::qk_norm_rope_backward")
def _backward(
    dq_out: Tensor,
    dk_out: Tensor,
    dv: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    interleaved: bool,
    wants_weights: bool,
    padding: int,
    finds_amax: bool,
) -> list[Tensor]:
    """Launch the backward kernel: on ``[B, H or K, S, D]``, or with ``dv`` on ``[T, H or K, D]``.

    Returns:
        dq and dk, or with ``dv`` the gradient of the merged product, ``[T, (H + 2K) · D]``; fp32
        ``[2, D]`` with the gradients of both weights, ``[2, 0]`` if not wanted; and the amax cell
        of the first, ``absent`` if not wanted.
    """
    *gradients, sums, amax = _gradients(
        dq_out,
        dk_out,
        dv,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        q_rstd,
        k_rstd,
        offset,
        interleaved,
        wants_weights,
        padding,
        finds_amax,
    )
    if dv is None:
        dq, dk = gradients
        # Placeholders, of which the kernel copies no heads.
        values, place = dk_out, dk
        v_heads = 0
    else:
        packed = (
            dense(dq_out),
            dense(dk_out),
            q,
            k,
            *heads_of(gradients[0], q.shape[1], k.shape[1]),
            dense(dv),
        )
        dq_out, dk_out, q, k, dq, dk, place, values = (x.transpose(0, 1)[None] for x in packed)
        cos = cos[None]
        sin = sin[None]
        v_heads = values.shape[1]
    batch, q_heads, length, width = q.shape
    k_heads = k.shape[1]
    positions = batch * length
    tile, constants = _launch(q, k, cos, interleaved, backward=True)
    programs = multiprocessors(q.device) * max(1, QK_NORM_ROPE_BACKWARD_WARPS // tile.warps)
    of_q, of_k = (
        min(
            triton.cdiv(positions * heads, tile.rows),
            max(1, programs * heads // (q_heads + k_heads)),
        )
        for heads in (q_heads, k_heads)
    )
    shares = q.new_empty((of_q + of_k, width if wants_weights else 0), dtype=torch.float32)
    if positions:
        _qk_norm_rope_backward_kernel[(of_q + of_k + triton.cdiv(positions * v_heads, tile.rows),)](
            dq_out,
            dk_out,
            values,
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            q_rstd,
            k_rstd,
            dq,
            dk,
            place,
            shares,
            amax if finds_amax else None,
            of_q,
            of_k,
            positions,
            length,
            *strides_of(cos, dq_out, dk_out, values, q, k, dq, dk, place),
            offset,
            *constants,
            wants_weights,
            v_heads,
            next_power_of_2(width),
            finds_amax,
            num_warps=tile.warps,
        )
    torch.stack((shares[:of_q].sum(0), shares[of_q:].sum(0)), out=sums)
    return [*gradients, sums, amax]


@torch.library.register_fake(_backward)
def _gradients(
    dq_out: Tensor,
    dk_out: Tensor,
    dv: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    interleaved: bool,
    wants_weights: bool,
    padding: int,
    finds_amax: bool,
) -> list[Tensor]:
    """Allocate what ``_backward`` returns."""
    sums = q.new_empty((2, q.shape[-1] * wants_weights), dtype=torch.float32)
    amax = new_amax(q, finds_amax)
    if dv is None:
        return [torch.empty_like(q), torch.empty_like(k), sums, amax]
    return [gradient_like(dq_out, dk_out, dv, padding), sums, amax]


class _MergedQKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        eps: float,
        offset: float,
        interleaved: bool,
        padding: int,
        amax: Amax | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads_of(qkv, *heads)
        weights = q_weight.contiguous(), k_weight.contiguous()
        of_both = (x.transpose(0, 1)[None] for x in (q, k))
        q_out, k_out, *rstd = _forward(
            *of_both, *weights, cos[None], sin[None], eps, offset, interleaved
        )
        ctx.save_for_backward(own_tensor(q), own_tensor(k), *weights, cos, sin, *rstd)
        ctx.options = (offset, interleaved, padding)
        ctx.amax = amax
        of_q, of_k = (x.squeeze(0).transpose(0, 1) for x in (q_out, k_out))
        return own_tensor(of_q), own_tensor(of_k), own_tensor(v)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:3]
        (offset, interleaved, padding) = ctx.options
        options = offset, interleaved, any(wanted), padding, ctx.amax is not None
        d_qkv, sums, cell = _backward(*gradients, *saved, *options)
        of_weights = (
            (dw.to(w.dtype) for dw, w in zip(sums.unbind(0), saved[2:4]))
            if any(wanted)
            else (None, None)
        )
        return with_amax(ctx.amax, d_qkv, cell), *of_weights


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        offset: float,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        taken = dense(q), dense(k), q_weight.contiguous(), k_weight.contiguous(), cos, sin
        q_out, k_out, *rstd = _forward(*taken, eps, offset, interleaved)
        ctx.save_for_backward(*taken, *rstd)
        ctx.offset = offset
        ctx.interleaved = interleaved
        return q_out, k_out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:4]
        options = ctx.offset, ctx.interleaved, any(wanted), 0, False
        dq, dk, sums, _ = _backward(dense(dq_out), dense(dk_out), None, *saved, *options)
        of_weights = (
            (dw.to(w.dtype) for dw, w in zip(sums.unbind(0), saved[2:4]))
            if any(wanted)
            else (None, None)
        )
        return dq, dk, *of_weights


def fused_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise every head of queries and keys, and rotate it by the angles of its position.

    Between the two a head is multiplied by ``offset + weight``.

    Args:
        q: queries ``[B, H, S, D]``, or packed ``[T, H, D]``.
        k: keys, like ``q``; the number of heads may differ.
        q_weight: weight of the queries' norm, ``[D]``.
        k_weight: weight of the keys' norm, ``[D]``.
        cos: cosines of the angles, ``[B, S, R]`` (``B`` may be 1), or packed ``[T, R]``; R ≤ D,
            filled over all R channels as transformers does. They get no gradient.
        sin: sines of the angles, like ``cos``.
        eps: added to the mean square.
        offset: added to the weights.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).

    Returns:
        Queries and keys, each in its own dtype.

    Raises:
        ValueError: shapes do not fit each other.
    """
    _check(q, k, q_weight, k_weight, cos, sin)
    cos = cos.detach()
    sin = sin.detach()
    if not runs_triton(q, k, q_weight, k_weight, cos, sin) or q.shape[-1] > MAX_ROW_WIDTH:
        return qk_norm_rope_reference(q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved)
    packed = q.ndim == 3
    of_q, of_k = (x.transpose(0, 1).unsqueeze(0) if packed else x for x in (q, k))
    cos, sin = (table[None] if packed else table for table in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos = cos.contiguous()
        sin = sin.contiguous()
    of_q, of_k = _QKNormRope.apply(
        of_q, of_k, q_weight, k_weight, cos, sin, eps, offset, interleaved
    )
    # squeeze(0), since the gradient of an index is a copy
    return (
        (of_q.squeeze(0).transpose(0, 1), of_k.squeeze(0).transpose(0, 1))
        if packed
        else (of_q, of_k)
    )


def fused_qkv_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
    gradient_padding: int = 0,
    gradient_amax: Amax | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply ``fused_qk_norm_rope`` to a merged product, whose gradient is one tensor.

    Args:
        qkv: ``[T, (H + 2K) · D]``.
        q_weight: weight of the queries' norm, ``[D]``.
        k_weight: weight of the keys' norm, ``[D]``.
        cos: cosines of the angles, ``[T, R]``.
        sin: sines of the angles, ``[T, R]``.
        heads: H and K.
        eps: added to the mean square.
        offset: added to the weights.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).
        gradient_padding: columns left free behind each row of the gradient.
        gradient_amax: slot that gets the largest absolute value of the gradient.

    Returns:
        Queries ``[T, H, D]``, keys ``[T, K, D]``, and values ``[T, K, D]``, a view of ``qkv``.

    Raises:
        ValueError: shapes do not fit each other.
    """
    q, k, v = heads_of(qkv, *heads)
    if not runs_triton(qkv, q_weight, k_weight, cos, sin) or q.shape[-1] > MAX_ROW_WIDTH:
        return *fused_qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved), v
    _check(q, k, q_weight, k_weight, cos, sin)
    cos = cos.detach()
    sin = sin.detach()
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos = cos.contiguous()
        sin = sin.contiguous()
    options = heads, eps, offset, interleaved, gradient_padding, gradient_amax
    return _MergedQKNormRope.apply(qkv, q_weight, k_weight, cos, sin, *options)


def _check(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Raise ValueError unless the shapes of heads, weights and tables fit each other."""
    check_rope(q, k, cos, sin)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != q.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}, q {tuple(q.shape)}: it must be "
                f"[{q.shape[-1]}]"
            )


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``fused_qk_norm_rope`` in plain torch, differentiable by autograd."""
    normalised_q, normalised_k = (
        rmsnorm_reference(x.to(torch.promote_types(x.dtype, torch.float32)), weight, eps, offset)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    of_q, of_k = qk_rope_reference(normalised_q, normalised_k, cos, sin, interleaved)
    return of_q.to(q.dtype), of_k.to(k.dtype)
