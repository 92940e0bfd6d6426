"""Rotary position embedding (Su et al., 2021, section 3.4.2) of queries and keys in one launch.

Channels are rotated in pairs (a, b): (i, i + R/2) in the half layout of transformers, (2i, 2i + 1)
if interleaved.

    a' = a · cos_a − b · sin_a          da = da' · cos_a + db' · sin_b
    b' = b · cos_b + a · sin_b          db = db' · cos_b − da' · sin_a

Tables of R channels may be narrower than the head of D; the other channels stay as they are
(partial rotary). Only the tables are saved for backward. Bytes a token in 16 bit: 4 · (H + K) · D
in each direction; the tables stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Amax, magnitude, new_amax, raise_amax, with_amax
from chronicals.kernels.launch import (
    Tile,
    differentiable_once,
    early_options,
    launches_early,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
    wait_for_kernel_before,
    with_padding,
)

EARLY_POSITIONS = 512
"""Positions up to which a launch takes as long as what it does, so that it is made early."""


def _tile(half: int, rest: int) -> Tile:
    """Return the tile for ``half`` pairs a head and ``rest`` further channels that are copied."""
    # Two warps a program and 16 pairs a thread, fewer if there are channels to copy. Measured on an
    # H200 at head widths 64, 128 and 256: 0.89, 0.94 and 0.90 of the copy rate; in place 0.87, 0.93
    # and 0.89.
    block = next_power_of_2(half)
    return Tile(max(1, min(64, 1024 // max(block, rest // 2))), block, warps=2)


@triton.jit
def heads_after(first, positions, length, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Locate ``ROWS`` consecutive heads from number ``first``, counted through all positions.

    Returns:
        Whether each exists, its batch, its token and its head, each ``[ROWS, 1]``.
    """
    row = first + tl.arange(0, ROWS)[:, None]
    position = row // HEADS
    batch = position // length
    token = position - batch * length
    head = row - position * HEADS
    return position < positions, batch.to(tl.int64), token.to(tl.int64), head.to(tl.int64)


@triton.jit
def load_pairs(at, inside, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the channels a and b of all pairs of the heads that begin at ``at``; 0 outside."""
    if INTERLEAVED:  # neighbours are loaded together and separated in registers
        column = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(at + column, mask=inside & (column < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        a = tl.load(at + column, mask=inside & (column < HALF), other=0.0)
        b = tl.load(at + (column + HALF), mask=inside & (column < HALF), other=0.0)
    return a, b


@triton.jit
def store_pairs(
    at, a, b, inside, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Write the pairs (a, b) of heads, each ``[ROWS, BLOCK]``, to the places ``at``."""
    a = a.to(at.dtype.element_ty)
    b = b.to(at.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(
            at + column,
            tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK)),
            mask=inside & (column < 2 * HALF),
        )
    else:
        column = tl.arange(0, BLOCK)[None, :]
        tl.store(at + column, a, mask=inside & (column < HALF))
        tl.store(at + (column + HALF), b, mask=inside & (column < HALF))


@triton.jit
def load_turn(
    cos_at, sin_at, inside, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load cos_a, cos_b, sin_a and sin_b in fp32."""
    cos_a, cos_b = load_pairs(cos_at, inside, HALF, BLOCK, INTERLEAVED)
    sin_a, sin_b = load_pairs(sin_at, inside, HALF, BLOCK, INTERLEAVED)
    return cos_a.to(tl.float32), cos_b.to(tl.float32), sin_a.to(tl.float32), sin_b.to(tl.float32)


@triton.jit
def _rotate_heads(
    # read, written, read, read, raised
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    amax_ptr,
    # the heads of this program
    first,
    positions,
    length,
    # strides, in elements
    x_batch,
    x_token,
    x_head,
    out_batch,
    out_token,
    out_head,
    table_batch,
    table_token,
    # shapes, tile and layout
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    # options
    INVERSE: tl.constexpr,
    HAS_AMAX: tl.constexpr,
):
    inside, batch, token, head = heads_after(first, positions, length, HEADS, ROWS)
    x_ptr += batch * x_batch + token * x_token + head * x_head
    out_ptr += batch * out_batch + token * out_token + head * out_head
    table = batch * table_batch + token * table_token
    a, b = load_pairs(x_ptr, inside, HALF, BLOCK, INTERLEAVED)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    cos_a, cos_b, sin_a, sin_b = load_turn(
        cos_ptr + table, sin_ptr + table, inside, HALF, BLOCK, INTERLEAVED
    )
    if INVERSE:
        rotated_a = a * cos_a + b * sin_b
        rotated_b = b * cos_b - a * sin_a
    else:
        rotated_a = a * cos_a - b * sin_a
        rotated_b = b * cos_b + a * sin_b
    store_pairs(out_ptr, rotated_a, rotated_b, inside, HALF, BLOCK, INTERLEAVED)
    if HAS_AMAX:  # rounding the maximum gives the maximum of the rounded values that are stored
        most = tl.max(tl.maximum(magnitude(rotated_a), magnitude(rotated_b)), 1)
        raise_amax(amax_ptr, most.to(out_ptr.dtype.element_ty).to(tl.float32))
    if REST:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        behind = inside & (column < WIDTH)
        at = out_ptr + column
        rest = tl.load(x_ptr + column, mask=behind)
        tl.store(at, rest, mask=behind)
        if HAS_AMAX:
            raise_amax(amax_ptr, tl.max(tl.where(behind, magnitude(rest.to(tl.float32)), 0.0), 1))


@triton.jit
def copy_heads(
    # read, written, raised
    x_ptr,
    out_ptr,
    amax_ptr,
    # the heads of this program
    first,
    positions,
    length,
    # strides, in elements
    x_batch,
    x_token,
    x_head,
    out_batch,
    out_token,
    out_head,
    # shapes and tile
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_AMAX: tl.constexpr,
):
    """Copy ``ROWS`` heads of values, and raise the cell to their largest magnitude if there is one."""
    inside, batch, token, head = heads_after(first, positions, length, HEADS, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside &= column < WIDTH
    x = tl.load(x_ptr + batch * x_batch + token * x_token + head * x_head + column, mask=inside)
    tl.store(
        out_ptr + batch * out_batch + token * out_token + head * out_head + column, x, mask=inside
    )
    if HAS_AMAX:
        raise_amax(amax_ptr, tl.max(tl.where(inside, magnitude(x.to(tl.float32)), 0.0), 1))


@triton.jit
def _qk_rope_kernel(
    # read
    q_ptr,
    k_ptr,
    v_ptr,
    # written; may be the same memory
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    # read
    cos_ptr,
    sin_ptr,
    # raised
    amax_ptr,
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
    v_batch,
    v_token,
    v_head,
    q_out_batch,
    q_out_token,
    q_out_head,
    k_out_batch,
    k_out_token,
    k_out_head,
    v_out_batch,
    v_out_token,
    v_out_head,
    table_batch,
    table_token,
    # shapes and tile; V_HEADS is 0 if no values are copied
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    # options
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate queries and keys, by the inverse angle if ``INVERSE``, and copy values.

    Each of ``Q_HEADS + K_HEADS + V_HEADS`` consecutive programs takes ``ROWS`` heads of the same
    ``ROWS`` positions, so these share the tables' rows in the cache.
    """
    wait_for_kernel_before(EARLY)
    group = tl.program_id(0) // (Q_HEADS + K_HEADS + V_HEADS)
    member = tl.program_id(0) - group * (Q_HEADS + K_HEADS + V_HEADS)
    if member < Q_HEADS:
        _rotate_heads(
            q_ptr,
            q_out_ptr,
            cos_ptr,
            sin_ptr,
            amax_ptr,
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
            Q_HEADS,
            ROWS,
            WIDTH,
            HALF,
            BLOCK,
            REST,
            INTERLEAVED,
            INVERSE,
            HAS_AMAX,
        )
    elif member < Q_HEADS + K_HEADS:
        _rotate_heads(
            k_ptr,
            k_out_ptr,
            cos_ptr,
            sin_ptr,
            amax_ptr,
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
            K_HEADS,
            ROWS,
            WIDTH,
            HALF,
            BLOCK,
            REST,
            INTERLEAVED,
            INVERSE,
            HAS_AMAX,
        )
    else:
        if V_HEADS:
            copy_heads(
                v_ptr,
                v_out_ptr,
                amax_ptr,
                (group * V_HEADS + member - Q_HEADS - K_HEADS) * ROWS,
                positions,
                length,
                v_batch,
                v_token,
                v_head,
                v_out_batch,
                v_out_token,
                v_out_head,
                V_HEADS,
                ROWS,
                WIDTH,
                WHOLE,
                HAS_AMAX,
            )


def strides_of(cos: Tensor, *of_heads: Tensor) -> list[int]:
    """Return strides of batch, token and head of each tensor ``[B, H, S, D]``; of a table the first two.

    That of the batch is 0 for a table that all of it share.
    """
    strides = [x.stride(dim) for x in of_heads for dim in (0, 2, 1)]
    return [*strides, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)]


def _launch(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inverse: bool,
    copied: tuple[Tensor, Tensor] | None = None,
    amax: Tensor | None = None,
) -> None:
    """Launch the kernel.

    Args:
        q: queries ``[B, H, S, D]`` with dense channels.
        k: keys ``[B, K, S, D]`` with dense channels.
        q_out: written; may be ``q``.
        k_out: written; may be ``k``.
        cos: ``[1 or B, S, R]``.
        sin: ``[1 or B, S, R]``.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).
        inverse: rotate back, as the backward pass does.
        copied: values and the tensor that they are copied to, both ``[B, K, S, D]``.
        amax: cell that is raised to the largest absolute value of all that is written.
    """
    batch, q_heads, length, width = q.shape
    if not q.numel():
        return
    half = cos.shape[-1] // 2
    k_heads = k.shape[1]
    positions = batch * length
    v, v_out = copied or (k, k_out)
    v_heads = v.shape[1] if copied else 0
    beside = 0 if q.data_ptr() == q_out.data_ptr() else width - 2 * half
    rest = next_power_of_2(beside) if beside else 0
    tile = _tile(half, rest)
    early = positions <= EARLY_POSITIONS and launches_early(q)
    _qk_rope_kernel[(triton.cdiv(positions, tile.rows) * (q_heads + k_heads + v_heads),)](
        q,
        k,
        v,
        q_out,
        k_out,
        v_out,
        cos,
        sin,
        amax,
        positions,
        length,
        *strides_of(cos, q, k, v, q_out, k_out, v_out),
        q_heads,
        k_heads,
        v_heads,
        tile.rows,
        width,
        half,
        tile.block,
        rest,
        next_power_of_2(width),
        interleaved,
        inverse,
        amax is not None,
        early,
        num_warps=tile.warps,
        **early_options(early),
    )


@operator("chronicals::qk_rope")
def _rotate_both(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inverse: bool,
    padding: int,
    finds_amax: bool,
) -> list[Tensor]:
    """Rotate q and k ``[B, H or K, S, D]``, or with ``v`` ``[T, H or K, D]`` into a merged tensor.

    Returns:
        Both, or with ``v`` all three side by side, ``[T, (H + 2K) · D]``; then the amax cell,
        ``absent`` if not wanted.
    """
    q = dense(q)
    k = dense(k)
    *results, amax = _outputs(q, k, v, cos, sin, interleaved, inverse, padding, finds_amax)
    cell = amax if finds_amax else None
    if v is None:
        q_out, k_out = results
        _launch(q, k, q_out, k_out, cos, sin, interleaved, inverse, None, cell)
    else:
        of_qkv = heads_of(results[0], q.shape[1], k.shape[1])
        q, k, v, of_q, of_k, of_v = (x.transpose(0, 1)[None] for x in (q, k, dense(v), *of_qkv))
        _launch(q, k, of_q, of_k, cos[None], sin[None], interleaved, inverse, (v, of_v), cell)
    return [*results, amax]


@torch.library.register_fake(_rotate_both)
def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inverse: bool,
    padding: int,
    finds_amax: bool,
) -> list[Tensor]:
    """Allocate what ``_rotate_both`` returns."""
    amax = new_amax(q, finds_amax)
    if v is None:
        return [torch.empty_like(dense(q)), torch.empty_like(dense(k)), amax]
    return [gradient_like(q, k, v, padding), amax]


@operator("chronicals::qk_rope_", mutates=("q", "k"))
def _rotate_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    of_both = dense(q), dense(k)
    _launch(*of_both, *of_both, cos, sin, interleaved, False)
    for x, rotated in zip((q, k), of_both):
        if rotated is not x:
            x.copy_(rotated)


def dense(x: Tensor) -> Tensor:
    """Return ``x`` with a last dimension of stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if not in_place:
            of_q, of_k, _ = _rotate_both(q, k, None, cos, sin, interleaved, False, 0, False)
            return of_q, of_k
        _rotate_in_place(q, k, cos, sin, interleaved)
        # Not mark_dirty: it refuses views, and a model's q and k are views of one product.
        return q.detach(), k.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options = ctx.interleaved, True, 0, False
        of_q, of_k, _ = _rotate_both(d_q, d_k, None, *ctx.saved_tensors, *options)
        return of_q, of_k


def gradient_like(d_q: Tensor, d_k: Tensor, d_v: Tensor, padding: int) -> Tensor:
    """Return an empty ``[T, (H + 2K) · D]`` with ``padding`` free columns behind each row."""
    return with_padding(
        d_q, (len(d_q), sum(x.shape[1] for x in (d_q, d_k, d_v)) * d_q.shape[2]), padding
    )


def heads_of(qkv: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``[T, H or K, D]`` as views of ``[T, (H + 2K) · D]``."""
    return qkv.unflatten(1, (q_heads + 2 * k_heads, -1)).split((q_heads, k_heads, k_heads), 1)  # type: ignore[return-value]


class _MergedRotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        interleaved: bool,
        padding: int,
        amax: Amax | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.options = (interleaved, True, padding, amax is not None)
        ctx.amax = amax
        q, k, v = heads_of(qkv, *heads)
        _rotate_in_place(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None], interleaved
        )
        return q.detach(), k.detach(), v.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_qkv, cell = _rotate_both(*gradients, *ctx.saved_tensors, *ctx.options)
        return (with_amax(ctx.amax, d_qkv, cell),)


def fused_qk_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    in_place: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q: queries ``[B, H, S, D]``, or packed ``[T, H, D]``.
        k: keys, like ``q``; the number of heads may differ.
        cos: cosines of the angles, ``[B, S, R]`` (``B`` may be 1), or packed ``[T, R]``; R ≤ D,
            filled over all R channels as transformers does. If it or ``sin`` requires a gradient,
            plain torch runs instead of the kernel.
        sin: sines of the angles, like ``cos``.
        in_place: overwrite ``q`` and ``k``. Use the returned tensors afterwards, not ``q`` and
            ``k``.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).

    Returns:
        Rotated queries and keys, shaped like ``q`` and ``k``.

    Raises:
        ValueError: shapes do not fit each other.
        RuntimeError: ``in_place`` would overwrite a leaf that requires a gradient, or rotate an
            element twice.
    """
    check_rope(q, k, cos, sin)
    packed = q.ndim == 3
    of_q, of_k = (x.transpose(0, 1).unsqueeze(0) if packed else x for x in (q, k))
    cos, sin = (table[None] if packed else table for table in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos = cos.contiguous()
        sin = sin.contiguous()
    if in_place:
        if torch.is_grad_enabled() and any(x.requires_grad and x.is_leaf for x in (q, k)):
            raise RuntimeError(
                "a leaf that requires a gradient would lose its value; rotate it with "
                "in_place=False"
            )
        expanded = any(
            stride == 0 and size > 1 for x in (q, k) for stride, size in zip(x.stride(), x.shape)
        )
        if expanded or q is k:
            raise RuntimeError(
                "q or k is expanded, or both are one tensor, which would be rotated twice; use "
                "in_place=False"
            )
    tables_learn = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if runs_triton(q, k, cos, sin) and not tables_learn:
        of_q, of_k = _Rotation.apply(of_q, of_k, cos, sin, interleaved, in_place)
    else:
        rotated = (
            _rotate(of_q, cos, sin, interleaved),
            _rotate(of_k, cos, sin, interleaved),
        )
        if in_place:
            of_q.copy_(rotated[0])
            of_k.copy_(rotated[1])
        else:
            of_q, of_k = rotated
    # squeeze(0), since the gradient of an index is a copy
    return (
        (of_q.squeeze(0).transpose(0, 1), of_k.squeeze(0).transpose(0, 1))
        if packed
        else (of_q, of_k)
    )


def fused_qkv_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    interleaved: bool = False,
    gradient_padding: int = 0,
    gradient_amax: Amax | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys of a merged product in place.

    Args:
        qkv: ``[T, (H + 2K) · D]``, which is overwritten; use the returned views afterwards.
        cos: cosines of the angles, ``[T, R]``, as in ``fused_qk_rope``.
        sin: sines of the angles, ``[T, R]``.
        heads: H and K.
        interleaved: channels are paired as (2i, 2i + 1), not (i, i + R/2).
        gradient_padding: columns left free behind each row of the gradient.
        gradient_amax: slot that gets the largest absolute value of the gradient.

    Returns:
        Queries ``[T, H, D]``, keys and values ``[T, K, D]``.

    Raises:
        ValueError: shapes do not fit each other.
    """
    q, k, v = heads_of(qkv, *heads)
    check_rope(q, k, cos, sin)
    if not runs_triton(qkv, cos, sin):
        return *qk_rope_reference(q, k, cos, sin, interleaved), v
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos = cos.contiguous()
        sin = sin.contiguous()
    return _MergedRotation.apply(qkv, cos, sin, heads, interleaved, gradient_padding, gradient_amax)


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless the shapes of queries, keys and tables fit each other."""
    if q.ndim not in (3, 4) or cos.ndim != q.ndim - 1 or cos.shape != sin.shape or k.ndim != q.ndim:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin "
            f"{tuple(sin.shape)}: expected "
            "[B, H, S, D] with tables [B, S, R], or [T, H, D] with tables [T, R]"
        )
    if cos.shape[-1] > q.shape[-1] or cos.shape[-1] % 2:
        raise ValueError(
            f"cos is {cos.shape[-1]} wide: must be even and at most the head's {q.shape[-1]}"
        )
    rows = (q.shape[0], q.shape[2]) if q.ndim == 4 else q.shape[:1]
    without_heads = (k.shape[0], *k.shape[2:]) if k.ndim == 4 else (k.shape[0], k.shape[2])
    if (
        without_heads != (*rows, q.shape[-1])
        or cos.shape[-2] != rows[-1]
        or (q.ndim == 4 and cos.shape[0] not in (1, rows[0]))
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} do not fit each other"
        )


def qk_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute ``fused_qk_rope`` in plain torch, out of place, differentiable by autograd."""
    if q.ndim == 4:
        return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)
    of_q, of_k = (_rotate(x.transpose(0, 1), cos, sin, interleaved).transpose(0, 1) for x in (q, k))
    return of_q, of_k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate ``x`` ``[..., H, S, D]`` by tables ``[..., S, R]``."""
    width = cos.shape[-1]
    first = x[..., :width]
    rest = x[..., width:]
    wide = first.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = (table.to(wide.dtype).unsqueeze(-3) for table in (cos, sin))
    # Each pair (a, b) becomes (−b, a).
    if interleaved:
        swapped = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        swapped = torch.cat((-b, a), -1)
    return torch.cat(((wide * cos + swapped * sin).to(x.dtype), rest), -1)
