"""Gradients of the weights of experts: sums of products of the rows of each expert.

    dW[e] = c · Σ_{s of e} a_sᵀ b_s       zeros for an expert without rows

The kernel can gather rows of one operand from tokens, as ``grouped_product.py`` does. Sums are
fp32, each in one order, without atomics; the host never waits. On Hopper torch's grouped product
computes wide ones.

Floor at S rows: ``2 · S · A · B`` FLOP; bytes in 16 bit: ``2 · (S · A + S · B + E · A · B)``.

Shapes: S pairs of token and expert, T tokens, E experts, a ``[S, A]``, b ``[S, B]``, dW ``[E, A, B]``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.expert_dispatch import Dispatch
from chronicals.kernels.grouped_launch import (
    ProductLaunch,
    box_of,
    fits,
    has_boxes,
    staged_launch,
    tile_of,
)
from chronicals.kernels.launch import (
    compiled_once,
    multiplied_in,
    next_power_of_2,
    operator,
    runs_in_16_bit,
    tl,
    triton,
)

CLEAR_BLOCK = 4096
"""Elements that a program of ``_clear_kernel`` writes at once."""

GATHER_NONE, GATHER_FIRST, GATHER_SECOND = range(3)
"""The operand of a weight gradient whose rows are gathered from tokens."""


@compiled_once(places=("order_ptr",))
def _weight_gradient_kernel(
    # read, by pointers or by descriptors of the copy engine
    a_ptr,
    a_box,
    b_ptr,
    b_box,
    # written
    out_ptr,
    # read: the dispatch (expert_dispatch.py)
    order_ptr,
    bounds_ptr,
    # widths of a and b
    high,
    wide,
    # strides, in elements
    a_stride,
    b_stride,
    out_stride_e,
    out_stride_a,
    out_stride_b,
    factor,
    # experts of a token, and options
    EACH: tl.constexpr,
    GATHERS: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    # no tile crosses an edge; what the copy engine fetches; dtype of the products
    WHOLE: tl.constexpr,
    BOXES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Compute one tile of an expert's weight gradient.

    ``GATHERS``: rows of a are gathered from tokens. ``BOXES``: 1 if the copy engine loads a, plus 2
    if it loads b. Whole steps within an expert's rows need no mask; only the last one has one.
    """
    tiles = tl.cdiv(high, ROWS)
    columns = tl.cdiv(wide, COLUMNS)
    expert = tl.program_id(0) // (tiles * columns)
    tile, block = tile_of(tl.program_id(0) % (tiles * columns), tiles, columns, GROUP)
    begin = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    whole = begin + (end - begin) // DEPTH * DEPTH
    for step in range(begin, whole, DEPTH):
        s = step + tl.arange(0, DEPTH)
        if BOXES % 2:
            a = a_box.load([step, tile * ROWS])
        else:
            of_a = tl.load(order_ptr + s) // EACH if GATHERS else s
            a_at = a_ptr + of_a.to(tl.int64)[:, None] * a_stride + row[None, :]
            a = tl.load(a_at) if WHOLE else tl.load(a_at, mask=(row < high)[None, :], other=0.0)
        if BOXES // 2:
            b = b_box.load([step, block * COLUMNS])
        else:
            b_at = b_ptr + s.to(tl.int64)[:, None] * b_stride + column[None, :]
            b = tl.load(b_at) if WHOLE else tl.load(b_at, mask=(column < wide)[None, :], other=0.0)
        total = tl.dot(tl.trans(a.to(KIND)), b.to(KIND), total, input_precision="ieee")
    if whole < end:
        s = whole + tl.arange(0, DEPTH)
        inside = (s < end)[:, None]
        of_a = tl.load(order_ptr + s, mask=s < end, other=0) // EACH if GATHERS else s
        a_at = a_ptr + of_a.to(tl.int64)[:, None] * a_stride + row[None, :]
        b_at = b_ptr + s.to(tl.int64)[:, None] * b_stride + column[None, :]
        a = tl.load(a_at, mask=inside & (row < high)[None, :], other=0.0)
        b = tl.load(b_at, mask=inside & (column < wide)[None, :], other=0.0)
        total = tl.dot(tl.trans(a.to(KIND)), b.to(KIND), total, input_precision="ieee")
    at = out_ptr + expert.to(tl.int64) * out_stride_e + row.to(tl.int64)[:, None] * out_stride_a
    at += column.to(tl.int64)[None, :] * out_stride_b
    tl.store(
        at,
        (total * factor).to(out_ptr.dtype.element_ty),
        mask=(row < high)[:, None] & (column < wide)[None, :],
    )


@triton.jit
def _clear_kernel(out_ptr, bounds_ptr, size, BLOCK: tl.constexpr):
    """Write zeros to the weight gradient of each expert without rows."""
    expert = tl.program_id(0)
    if tl.load(bounds_ptr + expert) == tl.load(bounds_ptr + expert + 1):
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + expert.to(tl.int64) * size + at, zeros, mask=at < size)


# torch's grouped product (CUTLASS) is faster than ours on Hopper for wide weight gradients. It
# needs gathered rows copied to their experts first, which costs what it gains up to a width of
# 1280. Measured on an H100 with 262144 rows and 128 experts: 627 TFLOP/s at 1536 x 2048, ours 401;
# 569 at 2048 x 768, ours 480 with rows gathered in the kernel; the copy takes 0.4 ms.
LIBRARY_MIN_SIDE = 256
"""Least width of both sides of a weight gradient for torch's grouped product."""

LIBRARY_MIN_WIDE_SIDE = 1280
"""Least width of the side that is not gathered, if the other one is."""


def uses_library(a: Tensor, b: Tensor, gathers: int, factor: float, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product computes a weight gradient.

    True on Hopper in bf16, without a factor, if both sides are wide and 16-byte aligned.
    """
    if (
        not a.is_cuda
        or torch.cuda.get_device_capability(a.device) != (9, 0)
        or not hasattr(F, "grouped_mm")
        or factor != 1.0
        or not a.dtype == dtype == torch.bfloat16
    ):
        return False
    if not _library_is_faster(a.shape[1], b.shape[1], gathers):
        return False
    return all(
        x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
        for x in (a, b)
    )


def _library_is_faster(high: int, wide: int, gathers: int) -> bool:
    other = {GATHER_NONE: LIBRARY_MIN_WIDE_SIDE, GATHER_FIRST: wide, GATHER_SECOND: high}[gathers]
    return min(high, wide) >= LIBRARY_MIN_SIDE and other >= LIBRARY_MIN_WIDE_SIDE


def _by_library(a: Tensor, b: Tensor, to: Dispatch, gathers: int) -> Tensor:
    """Compute a weight gradient by torch's grouped product."""
    if gathers != GATHER_NONE:
        tokens = to.order_S // to.each
        a, b = (a[tokens], b) if gathers == GATHER_FIRST else (a, b[tokens])
    out: Tensor = F.grouped_mm(a.t(), b, offs=to.bounds[1:].contiguous())
    # It leaves the gradients of experts without rows uninitialised.
    size = out[0].numel()
    _clear_kernel[(to.experts, max(1, min(64, size // CLEAR_BLOCK)))](
        out, to.bounds, size, CLEAR_BLOCK
    )
    return out


def weight_gradient_launch(
    high: int, wide: int, on: torch.device, gathers: bool = True
) -> ProductLaunch:
    """Return the launch of ``_weight_gradient_kernel`` for an expert's gradient ``[high, wide]``."""
    rows, columns = (
        min(most, max(16, next_power_of_2(size))) for size, most in ((high, 128), (wide, 256))
    )
    boxes = has_boxes(on)
    columns = columns if fits(rows, columns, 3, on) else min(columns, 128)
    launch = staged_launch(rows, columns, on, boxes, most=3 if boxes else 4)
    # The places of gathered rows are loaded ahead of the rows themselves, which takes two more
    # stages but no shared memory.
    return replace(launch, stages=launch.stages + 2) if gathers and boxes else launch


@operator("chronicals::grouped_weight_gradient")
def _weight_gradient(
    a: Tensor,
    b: Tensor,
    order: Tensor,
    bounds: Tensor,
    each: int,
    gathers: int,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    if uses_library(a, b, gathers, factor, dtype):
        return _by_library(a, b, Dispatch(order, order, bounds, bounds, each, 0), gathers)
    high, wide = (b, a) if gathers == GATHER_SECOND else (a, b)
    launch = weight_gradient_launch(high.shape[1], wide.shape[1], a.device, gathers != GATHER_NONE)
    return launch_weight_gradient(
        launch, a, b, Dispatch(order, order, bounds, bounds, each, 0), gathers, factor, dtype
    )


@torch.library.register_fake(_weight_gradient)
def _(
    a: Tensor,
    b: Tensor,
    order: Tensor,
    bounds: Tensor,
    each: int,
    gathers: int,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(len(bounds) - 1, a.shape[1], b.shape[1], dtype=dtype)


def launch_weight_gradient(
    launch: ProductLaunch,
    a: Tensor,
    b: Tensor,
    to: Dispatch,
    gathers: int,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the weight gradient with a given launch; see ``grouped_weight_gradient``."""
    out = a.new_empty(to.experts, a.shape[1], b.shape[1], dtype=dtype)
    into = out
    # The kernel gathers its first operand, the narrower side of a tile; dWᵀ is written instead.
    if gathers == GATHER_SECOND:
        a, b, into = b, a, out.mT
    high = a.shape[1]
    wide = b.shape[1]
    a_box = (
        box_of(a, (launch.depth, launch.rows)) if launch.boxes and gathers == GATHER_NONE else None
    )
    b_box = box_of(b, (launch.depth, launch.columns)) if launch.boxes else None
    grid = to.experts * triton.cdiv(high, launch.rows) * triton.cdiv(wide, launch.columns)
    _weight_gradient_kernel[(grid,)](
        a,
        a_box,
        b,
        b_box,
        into,
        to.order_S,
        to.bounds,
        high,
        wide,
        a.stride(0),
        b.stride(0),
        *into.stride(),
        factor,
        to.each,
        gathers != GATHER_NONE,
        launch.rows,
        launch.columns,
        launch.depth,
        launch.group,
        high % launch.rows == 0 and wide % launch.columns == 0,
        (a_box is not None) + 2 * (b_box is not None),
        multiplied_in(a.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


def grouped_weight_gradient(
    a: Tensor,
    b: Tensor,
    to: Dispatch,
    of_tokens: int = GATHER_NONE,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``factor · Σ_s a_sᵀ b_s`` over the rows of each expert, ``[E, A, B]``.

    Args:
        a: ``[S, A]`` sorted by expert, or ``[T, A]`` if its rows are gathered from tokens.
        b: ``[S, B]`` or ``[T, B]``, likewise.
        to: the dispatch of the rows.
        of_tokens: the operand whose rows are gathered: ``GATHER_NONE``, ``GATHER_FIRST`` or
            ``GATHER_SECOND``.
        factor: factor c of the sum.
        dtype: dtype of the result; that of ``a`` by default.
    """
    dtype = dtype or a.dtype
    if len(to.order_S) and runs_in_16_bit(a, b):
        return _weight_gradient(a, b, to.order_S, to.bounds, to.each, of_tokens, factor, dtype)
    return grouped_weight_gradient_reference(a, b, to, of_tokens, factor, dtype)


def grouped_weight_gradient_reference(
    a: Tensor,
    b: Tensor,
    to: Dispatch,
    of_tokens: int = GATHER_NONE,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``grouped_weight_gradient`` in plain torch, expert by expert.

    Rows are copied as in ``grouped_product_reference``.
    """
    tokens = to.order_S.long() // to.each
    a = a[tokens] if of_tokens == GATHER_FIRST else a
    b = b[tokens] if of_tokens == GATHER_SECOND else b
    wide = torch.promote_types(a.dtype, torch.float32)
    out = a.new_zeros(to.experts, a.shape[1], b.shape[1], dtype=dtype or a.dtype)
    for expert, span in to.spans():
        own_a = a[span].to(wide, copy=True)
        own_b = b[span].to(wide, copy=True)
        out[expert] = factor * (own_a.t() @ own_b)
    return out
