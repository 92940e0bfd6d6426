"""Grouped products: rows sorted by expert times the weight of their expert, and gradients.

    y_s = c · x_s W[e_s]ᵀ + u_s B[e_s]ᵀ + b[e_s]      (rows; u and B of an adapter, b a bias, c a factor)
    dW[e] = c · Σ_{s of e} a_sᵀ b_s                   (weight gradient; zeros for an expert without rows)

The kernels can gather rows of x from tokens: row s is then token ``order[s] // k``, so the k copies
of a token never exist in memory. dx = dy W is the first product with ``W.transpose(1, 2)``. Sums
are fp32, each in one order, without atomics. The host never waits, and no expert has a limit on its
rows. The FP8 form, with scales of rows and of experts, is in ``fp8_grouped_product.py``.

Floor of the first product at S rows: ``2 · S · N · K`` FLOP; bytes in 16 bit: ``2 · (S · K + E · N
· K + S · N)``. Tiles of an expert follow each other, so its rows and its weight stay in the L2
cache.

Shapes: S pairs of token and expert, E experts, K inputs, N outputs, R rank of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.expert_dispatch import TALL_TILE_ROWS, Dispatch
from chronicals.kernels.launch import (
    compiled_once,
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    operator,
    runs_in_16_bit,
    shared_memory,
    tl,
    triton,
)

CLEAR_BLOCK = 4096
"""Elements that a program of ``_clear_kernel`` writes at once."""

STEP_DEPTH = 64
"""Depth of a step of the sum over K: 64 elements of 16 bits are rows of 128 bytes."""

MAX_ADAPTER_COLUMNS = 256
"""Columns of an adapter that a tile holds at once, at most: as many as fit in shared memory beside
the tile's narrowest result.
"""

MAX_ADAPTER_COLUMNS_SMALL = 64
"""The same for cards with at most 64 KiB of shared memory, as a T4, which multiplies in fp32."""


@dataclass(frozen=True)
class ProductLaunch:
    """Launch settings of one of the two kernels.

    Attributes:
        columns: columns of a tile of the result.
        depth: depth of a step of the sum.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        group: tiles along the rows that are taken together, column after column.
        persistent: launch only as many programs as run at once; each takes tile after tile.
        boxes: load tiles whose rows are contiguous by Hopper's copy engine (TMA).
        rows: rows of a tile of a weight gradient; a product takes the dispatch's.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    persistent: bool = False
    boxes: bool = False
    rows: int = 128


class LowRankTerm(NamedTuple):
    """The adapter's part of a product: ``u_SR B[e]ᵀ``, with B ``[E, N, R]``."""

    u_SR: Tensor
    up_ENR: Tensor


@triton.jit
def _tile_of(number, tiles, columns, GROUP: tl.constexpr):
    """Return row and column of a tile.

    Numbers go down ``GROUP`` rows of tiles, column after column, which reuses operands in L2.
    """
    group = number // (GROUP * columns)
    first = group * GROUP
    height = tl.minimum(tiles - first, GROUP)
    within = number - group * GROUP * columns
    return first + within % height, within // height


@triton.jit
def low_rank_term(
    total,
    u_ptr,
    up_ptr,
    row,
    expert,
    column,
    width,
    u_stride,
    up_stride_e,
    up_stride_n,
    up_stride_r,
    RANK: tl.constexpr,
    HELD: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return a tile's sums plus its part of ``u B[e]ᵀ``; without an adapter ``RANK`` is 0."""
    for of_rank in tl.static_range(0, RANK, HELD):
        r = of_rank + tl.arange(0, HELD)
        u_at = u_ptr + row.to(tl.int64)[:, None] * u_stride + r[None, :]
        u = tl.load(u_at, mask=(r < RANK)[None, :], other=0.0)
        up_at = (
            up_ptr
            + expert.to(tl.int64) * up_stride_e
            + column[None, :] * up_stride_n
            + r[:, None] * up_stride_r
        )
        up = tl.load(up_at, mask=(r < RANK)[:, None] & (column < width)[None, :], other=0.0)
        total = tl.dot(u.to(KIND), up.to(KIND), total, input_precision="ieee")
    return total


@compiled_once(sizes=("tiles", "experts"), places=("order_ptr",))
def _product_kernel(
    # read, by pointers or by descriptors of the copy engine
    x_ptr,
    x_box,
    w_ptr,
    w_box,
    # written
    y_ptr,
    # read: bias, adapter, scales of FP8, each may be None
    bias_ptr,
    u_ptr,
    up_ptr,
    x_scale_ptr,
    w_scale_ptr,
    # read: the dispatch (expert_dispatch.py)
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    # read: the place of each expert's matrix in w, may be None
    slots_ptr,
    # sizes: tiles, N, K, experts of a token
    tiles,
    width,
    depth,
    each,
    # strides, in elements
    x_stride,
    w_stride_e,
    w_stride_n,
    w_stride_k,
    y_stride,
    bias_stride,
    u_stride,
    up_stride_e,
    up_stride_n,
    up_stride_r,
    # of the product, and the number of experts
    factor,
    experts,
    # options; RANK is 0 without an adapter
    GATHERS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    HELD: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    # no step, or tile, crosses an edge
    WHOLE_DEPTH: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    # what the copy engine fetches, dtypes of the products, sums of FP8
    BOXES: tl.constexpr,
    KIND: tl.constexpr,
    THIN: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Compute tiles of the first product.

    ``BOXES``, from ``_boxes``, says which of x and w the copy engine loads; the other is loaded
    through pointers. ``KIND`` and ``THIN`` are the dtypes of the main product and of the adapter's.
    ``SCALED``: x has scales of rows and w of experts. ``FAST``: sums in FP8 stay in the tensor
    cores' accumulators, which have fewer bits than fp32, along all of K.
    """
    steps: tl.constexpr = None if FAST else DEPTH
    columns = tl.cdiv(width, COLUMNS)
    for number in range(tl.program_id(0), tiles * columns, tl.num_programs(0)):
        tile, block = _tile_of(number, tiles, columns, GROUP)
        expert = tl.load(tiles_ptr + tile)
        if expert < experts:
            first = tl.load(tiles_ptr + tiles + tile)
            end = tl.load(bounds_ptr + expert + 1)
            slot = tl.load(slots_ptr + expert) if HAS_SLOTS else expert
            row = first + tl.arange(0, ROWS)
            # Rows beyond the expert's end repeat its last one and are not stored.
            taken = tl.minimum(row, end - 1)
            source = tl.load(order_ptr + taken) // each if GATHERS else taken
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            k = tl.arange(0, DEPTH)
            x_at = x_ptr + source.to(tl.int64)[:, None] * x_stride + k[None, :]
            w_at = (
                w_ptr + slot.to(tl.int64) * w_stride_e + column.to(tl.int64)[None, :] * w_stride_n
            )
            w_at += k[:, None] * w_stride_k
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for step in range(0, depth, DEPTH):
                if BOXES % 2:
                    x = x_box.load([first, step])
                elif WHOLE_DEPTH:
                    x = tl.load(x_at)
                else:
                    x = tl.load(x_at, mask=(step + k < depth)[None, :], other=0.0)
                if BOXES // 2 == 1:
                    w = w_box.load([slot, block * COLUMNS, step]).reshape(COLUMNS, DEPTH).T
                elif BOXES // 2 == 2:
                    w = w_box.load([slot, step, block * COLUMNS]).reshape(DEPTH, COLUMNS)
                elif WHOLE_DEPTH and WHOLE_COLUMNS:
                    w = tl.load(w_at)
                else:
                    w = tl.load(
                        w_at,
                        mask=(step + k < depth)[:, None] & (column < width)[None, :],
                        other=0.0,
                    )
                total = tl.dot(
                    x.to(KIND),
                    w.to(KIND),
                    total,
                    input_precision="ieee",
                    max_num_imprecise_acc=steps,
                )
                x_at += DEPTH
                w_at += DEPTH * w_stride_k
            total *= factor
            if SCALED:
                total = (
                    total * tl.load(x_scale_ptr + source)[:, None] * tl.load(w_scale_ptr + expert)
                )
            total = low_rank_term(
                total,
                u_ptr,
                up_ptr,
                taken,
                expert,
                column,
                width,
                u_stride,
                up_stride_e,
                up_stride_n,
                up_stride_r,
                RANK,
                HELD,
                THIN,
            )
            if HAS_BIAS:
                bias = tl.load(
                    bias_ptr + expert.to(tl.int64) * bias_stride + column,
                    mask=column < width,
                    other=0.0,
                )
                total += bias.to(tl.float32)[None, :]
            y_at = y_ptr + row.to(tl.int64)[:, None] * y_stride + column[None, :]
            tl.store(
                y_at,
                total.to(y_ptr.dtype.element_ty),
                mask=(row < end)[:, None] & (column < width)[None, :],
            )


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
    tile, block = _tile_of(tl.program_id(0) % (tiles * columns), tiles, columns, GROUP)
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


def product_launch(rows: int, width: int, on: torch.device, rank: int = 0) -> ProductLaunch:
    """Return the launch of ``_product_kernel``.

    Args:
        rows: rows of a tile.
        width: columns N of the result.
        on: the device.
        rank: rank of the adapter, 0 for none.
    """
    # Measured on an H100 with 32768 tokens, 8 of 128 experts each, 2048 x 1536: 659 TFLOP/s with
    # the copy engine, 608 without; a fourth stage costs 3 %, half the columns 28 %.
    columns = min(256 if rows == TALL_TILE_ROWS else 128, max(16, next_power_of_2(width)))
    adapter_stages = held_columns(rank, on) / STEP_DEPTH if rank else 0
    while columns > 16 and not (
        _fits(rows, columns, 3, on) and _fits(rows, columns, adapter_stages, on)
    ):
        columns //= 2
        if (
            columns <= 128
            and _fits(rows, columns, 2, on)
            and _fits(rows, columns, adapter_stages, on)
        ):
            break
    boxes = has_boxes(on)
    return _launch(rows, columns, on, boxes, most=3 if boxes else 4)


def held_columns(rank: int, on: torch.device) -> int:
    """Return the columns of an adapter that a tile holds at once, a power of 2."""
    most = MAX_ADAPTER_COLUMNS_SMALL if 0 < shared_memory(on) <= 64 << 10 else MAX_ADAPTER_COLUMNS
    return min(most, max(16, next_power_of_2(rank)))


def weight_gradient_launch(
    high: int, wide: int, on: torch.device, gathers: bool = True
) -> ProductLaunch:
    """Return the launch of ``_weight_gradient_kernel`` for an expert's gradient ``[high, wide]``."""
    rows, columns = (
        min(most, max(16, next_power_of_2(size))) for size, most in ((high, 128), (wide, 256))
    )
    boxes = has_boxes(on)
    columns = columns if _fits(rows, columns, 3, on) else min(columns, 128)
    launch = _launch(rows, columns, on, boxes, most=3 if boxes else 4)
    # The places of gathered rows are loaded ahead of the rows themselves, which takes two more
    # stages but no shared memory.
    return replace(launch, stages=launch.stages + 2) if gathers and boxes else launch


def has_boxes(on: torch.device) -> bool:
    """Return whether the card has the copy engine (TMA) of Hopper and later."""
    return on.type == "cuda" and torch.cuda.get_device_capability(on) >= (9, 0)


def _launch(rows: int, columns: int, on: torch.device, boxes: bool, most: int) -> ProductLaunch:
    """Return the launch with as many stages as shared memory allows, up to ``most``."""
    stages = next((stages for stages in range(most, 1, -1) if _fits(rows, columns, stages, on)), 1)
    return ProductLaunch(
        columns, STEP_DEPTH, 8 if rows * columns >= 128 * 256 else 4, stages, boxes=boxes, rows=rows
    )


def _fits(rows: int, columns: int, stages: float, on: torch.device) -> bool:
    """Return whether shared memory holds the operands of ``stages`` steps in 16 bit."""
    room = shared_memory(on)
    # 4096 bytes are left for barriers.
    return not room or stages * (rows + columns) * STEP_DEPTH * 2 + 4096 <= room


def _boxes(
    x: Tensor, w: Tensor, gathers: bool, launch: ProductLaunch, rows: int
) -> tuple[Any, Any, int]:
    """Make descriptors of x and W for the copy engine.

    Returns:
        The descriptors, None for an operand that it cannot load, and the kernel's ``BOXES``: 1 if
        it loads x, plus 2 for a W with dense K, or 4 for a W with dense N.
    """
    if not launch.boxes:
        return None, None, 0
    of_x = _box(x, (rows, launch.depth)) if not gathers else None
    dense_k = w.stride(2) == 1
    of_w = (
        _box(w, (1, launch.columns, launch.depth))
        if dense_k
        else _box(w.transpose(1, 2), (1, launch.depth, launch.columns))
    )
    return of_x, of_w, (of_x is not None) + (0 if of_w is None else 2 if dense_k else 4)


def _box(x: Tensor, shape: tuple[int, ...]) -> Any:
    """Make a descriptor; None if rows do not begin at multiples of 16 bytes, as TMA requires."""
    size = x.element_size()
    if (
        x.stride(-1) != 1
        or any(stride * size % 16 for stride in x.stride()[:-1])
        or x.data_ptr() % 16
    ):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(shape))


@operator("chronicals::grouped_product")
def _product(
    x: Tensor,
    w: Tensor,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    rows: int,
    gathers: bool,
    bias: Tensor | None,
    u: Tensor | None,
    up: Tensor | None,
    factor: float,
    slots: Tensor | None,
) -> Tensor:
    launch = product_launch(rows, w.shape[1], x.device, 0 if up is None else up.shape[2])
    return launch_product(
        launch,
        x,
        w,
        Dispatch(order, order, bounds, tiles, each, rows),
        gathers,
        bias,
        u,
        up,
        factor,
        slots=slots,
    )


@torch.library.register_fake(_product)
def _(
    x: Tensor,
    w: Tensor,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    rows: int,
    gathers: bool,
    bias: Tensor | None,
    u: Tensor | None,
    up: Tensor | None,
    factor: float,
    slots: Tensor | None,
) -> Tensor:
    return x.new_empty(len(order), w.shape[1])


def launch_product(
    launch: ProductLaunch,
    x: Tensor,
    w: Tensor,
    to: Dispatch,
    gathers: bool,
    bias: Tensor | None = None,
    u: Tensor | None = None,
    up: Tensor | None = None,
    factor: float = 1.0,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    fast: bool = True,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute the first product with a given launch.

    Other arguments are those of ``grouped_product``. For operands in FP8, ``scales`` are those of
    rows and of experts, and ``dtype`` and ``fast`` are as in ``fp8_grouped_product``.
    """
    width, depth = w.shape[1:]
    y = x.new_empty(len(to.order_S), width, dtype=dtype)
    of_x, of_w = scales or (None, None)
    x_box, w_box, boxes = _boxes(x, w, gathers, launch, to.rows)
    most = to.tiles.shape[1]
    blocks = most * triton.cdiv(width, launch.columns)
    grid = min(blocks, multiprocessors(x.device)) if launch.persistent else blocks
    rank = 0 if up is None else up.shape[2]
    _product_kernel[(grid,)](
        x,
        x_box,
        w,
        w_box,
        y,
        bias,
        u,
        up,
        of_x,
        of_w,
        to.order_S,
        to.bounds,
        to.tiles,
        slots,
        most,
        width,
        depth,
        to.each,
        x.stride(0),
        *w.stride(),
        y.stride(0),
        0 if bias is None else bias.stride(0),
        0 if u is None else u.stride(0),
        *((0, 0, 0) if up is None else up.stride()),
        factor,
        to.experts,
        gathers,
        slots is not None,
        bias is not None,
        rank,
        held_columns(rank, x.device),
        to.rows,
        launch.columns,
        launch.depth,
        launch.group,
        depth % launch.depth == 0,
        width % launch.columns == 0,
        boxes,
        multiplied_in(x.dtype),
        multiplied_in(x.dtype if u is None else u.dtype),
        scales is not None,
        fast,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return y


GATHER_NONE, GATHER_FIRST, GATHER_SECOND = range(3)
"""The operand of a weight gradient whose rows are gathered from tokens."""


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
        _box(a, (launch.depth, launch.rows)) if launch.boxes and gathers == GATHER_NONE else None
    )
    b_box = _box(b, (launch.depth, launch.columns)) if launch.boxes else None
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


def grouped_product(
    x: Tensor,
    weight: Tensor,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: LowRankTerm | None = None,
    factor: float = 1.0,
    slots: Tensor | None = None,
) -> Tensor:
    """Multiply each row with the weight of its expert.

    Args:
        x: ``[S, K]`` sorted by expert, or ``[T, K]`` if ``of_tokens``.
        weight: ``[E, N, K]`` with stride 1 along N or K; with ``slots`` matrices of any number.
        to: the dispatch of the rows.
        of_tokens: gather the rows of x from tokens.
        bias: ``[E, N]``.
        adapted: the adapter's part, added to the result.
        factor: factor c of the product ``x Wᵀ`` alone.
        slots: int32 ``[E]``, the place in ``weight`` of each expert's matrix; those of experts
            without rows are not read.

    Returns:
        ``[S, N]`` in the dtype of x.

    Raises:
        ValueError: shapes do not fit.
    """
    check_product(x, weight, to, of_tokens, slots)
    u, up = (None, None) if adapted is None else adapted
    others = [tensor for tensor in (bias, u) if tensor is not None]
    dense = (
        1 in weight.stride()[1:] and (up is None or up.dtype == x.dtype) and weight.dtype == x.dtype
    )
    if len(to.order_S) and dense and runs_in_16_bit(x, *others):
        return _product(
            x,
            weight,
            to.order_S,
            to.bounds,
            to.tiles,
            to.each,
            to.rows,
            of_tokens,
            bias,
            u,
            up,
            factor,
            slots,
        )
    return grouped_product_reference(x, weight, to, of_tokens, bias, adapted, factor, slots)


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


def check_product(
    x: Tensor, weight: Tensor, to: Dispatch, of_tokens: bool, slots: Tensor | None = None
) -> None:
    """Raise ValueError unless the shapes of a grouped product's operands fit each other."""
    rows = to.tokens if of_tokens else len(to.order_S)
    if (
        x.ndim != 2
        or weight.ndim != 3
        or x.shape != (rows, weight.shape[2])
        or len(weight if slots is None else slots) != to.experts
    ):
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}: expected [{rows}, K] and "
            f"[{to.experts}, N, K]"
        )
    if slots is not None and slots.dtype != torch.int32:
        raise ValueError(f"slots are {slots.dtype}: expected torch.int32")


def grouped_product_reference(
    x: Tensor,
    weight: Tensor,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: LowRankTerm | None = None,
    factor: float = 1.0,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute ``grouped_product`` in plain torch, expert by expert; the host waits for the counts.

    The rows of an expert are multiplied in memory of their own: a CPU's library sums in another order
    where rows begin at other multiples of 64 bytes, so bits would depend on the experts before.
    """
    bounds = to.bounds.tolist()
    places = range(to.experts) if slots is None else slots.tolist()
    rows = x[to.order_S.long() // to.each] if of_tokens else x
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_empty(len(rows), weight.shape[1])
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin == end:
            continue
        own = rows[begin:end].to(wide, copy=True)
        total = factor * (own @ weight[places[expert]].to(wide).t())
        if adapted is not None:
            u = adapted.u_SR[begin:end].to(wide, copy=True)
            total += u @ adapted.up_ENR[expert].to(wide).t()
        y[begin:end] = total if bias is None else total + bias[expert]
    return y


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
    bounds = to.bounds.tolist()
    wide = torch.promote_types(a.dtype, torch.float32)
    out = a.new_zeros(to.experts, a.shape[1], b.shape[1], dtype=dtype or a.dtype)
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin < end:
            own_a = a[begin:end].to(wide, copy=True)
            own_b = b[begin:end].to(wide, copy=True)
            out[expert] = factor * (own_a.t() @ own_b)
    return out
