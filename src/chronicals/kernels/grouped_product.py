"""Products of rows sorted by expert with the weight of their expert, and the gradient of those
weights.

    y_s = c · x_s W[e_s]ᵀ + u_s B[e_s]ᵀ + b[e_s]      (rows; u and B are an adapter's, b a bias, c a factor)
    dW[e] = c · Σ_{s of e} a_sᵀ b_s                   (weight gradient; zeros where an expert has no rows)

Rows of x may be those of tokens: row s is then ``order[s] // k``, so the k copies of a token never
exist. dx = dy W is the first product with ``W.transpose(1, 2)``. Sums are fp32, each in one order;
no atomics, no host synchronisation, no capacity. In FP8, with scales of rows and of experts:
``fp8_grouped_product.py``.

Floor of the first at S rows: ``2 · S · N · K`` FLOP; bytes in 16 bit: ``2 · (S · K + E · N · K + S
· N)``. Tiles of an expert follow each other, so that its rows and its weight stay in the L2 cache.

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
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    runs_in_16_bit,
    shared_memory,
    tl,
    triton,
)
from chronicals.kernels.operators import operator

CLEAR_BLOCK = 4096
"""Elements that a program of ``_clear_kernel`` writes at once."""

STEP_DEPTH = 64
"""Of a step, in elements: rows of 128 bytes."""

MAX_ADAPTER_COLUMNS = 256
MAX_ADAPTER_COLUMNS_SMALL = 64
"""Columns of an adapter that a tile holds at once, at most: as many as fit beside a tile's
narrowest result. A T4 multiplies in fp32 and has 64 KiB."""


@dataclass(frozen=True)
class ProductLaunch:
    """How one of the two kernels runs.

    Attributes:
        columns: of a tile of the result; its rows are the dispatch's, or of a weight gradient
            ``rows``.
        depth: of a step of the sum.
        group: tiles along the rows whose columns are taken together.
        persistent: as many programs as run at once, each of which takes tile after tile.
        boxes: tiles whose rows lie together come from Hopper's copy engine.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    persistent: bool = False
    boxes: bool = False
    rows: int = 128


class Adapted(NamedTuple):
    """What an adapter adds to a product: ``u_SR B[e]ᵀ``, B ``[E, N, R]``."""

    u_SR: Tensor
    up_ENR: Tensor


@triton.jit
def _tile_of(number, tiles, columns, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at once, column after column."""
    group = number // (GROUP * columns)
    first = group * GROUP
    height = tl.minimum(tiles - first, GROUP)
    within = number - group * GROUP * columns
    return first + within % height, within // height


@triton.jit
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
    """BOXES: of ``_boxes``; those of x and of w come from the copy engine, the others through
    pointers. THIN: of an adapter's operands. SCALED: x has scales of rows, w of experts. FAST:
    sums in FP8 stay in the tensor cores' own registers."""
    steps: tl.constexpr = None if FAST else DEPTH
    columns = tl.cdiv(width, COLUMNS)
    for number in range(tl.program_id(0), tiles * columns, tl.num_programs(0)):
        tile, block = _tile_of(number, tiles, columns, GROUP)
        expert = tl.load(tiles_ptr + tile)
        if expert < experts:
            first = tl.load(tiles_ptr + tiles + tile)
            end = tl.load(bounds_ptr + expert + 1)
            row = first + tl.arange(0, ROWS)
            taken = tl.minimum(
                row, end - 1
            )  # rows beyond the end repeat the last one and are not stored
            source = tl.load(order_ptr + taken) // each if GATHERS else taken
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            k = tl.arange(0, DEPTH)
            x_at = x_ptr + source.to(tl.int64)[:, None] * x_stride + k[None, :]
            w_at = (
                w_ptr + expert.to(tl.int64) * w_stride_e + column.to(tl.int64)[None, :] * w_stride_n
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
                    w = w_box.load([expert, block * COLUMNS, step]).reshape(COLUMNS, DEPTH).T
                elif BOXES // 2 == 2:
                    w = w_box.load([expert, step, block * COLUMNS]).reshape(DEPTH, COLUMNS)
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
            for of_rank in tl.static_range(0, RANK, HELD):
                r = of_rank + tl.arange(0, HELD)
                u_at = u_ptr + taken.to(tl.int64)[:, None] * u_stride + r[None, :]
                u = tl.load(u_at, mask=(r < RANK)[None, :], other=0.0)
                up_at = (
                    up_ptr
                    + expert.to(tl.int64) * up_stride_e
                    + column[None, :] * up_stride_n
                    + r[:, None] * up_stride_r
                )
                up = tl.load(up_at, mask=(r < RANK)[:, None] & (column < width)[None, :], other=0.0)
                total = tl.dot(u.to(THIN), up.to(THIN), total, input_precision="ieee")
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


@triton.jit
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
    """GATHERS: rows of a are those of tokens. BOXES: 1 for a, and 2 for b, where these come from
    the copy engine. Steps within an expert's rows know no bounds; the last one does."""
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
    """Zeros where an expert has no rows."""
    expert = tl.program_id(0)
    if tl.load(bounds_ptr + expert) == tl.load(bounds_ptr + expert + 1):
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + expert.to(tl.int64) * size + at, zeros, mask=at < size)


LIBRARY_MIN_WIDE_SIDE = 1280
LIBRARY_MIN_SIDE = 256
"""torch's grouped product (CUTLASS) takes a weight gradient on Hopper where both sides are at
least NARROW wide, and where no rows are gathered, or the other side is at least WIDE: it wants
them copied to their experts, which takes as long as a product of that width gains. An H100,
262144 rows, 128 experts: 627 TFLOP/s at 1536 x 2048, ours 401; 569 at 2048 x 768, ours 480 with
rows gathered by itself, the copy 0.4 ms."""


def uses_library(a: Tensor, b: Tensor, gathers: int, factor: float, dtype: torch.dtype) -> bool:
    """Whether a weight gradient is torch's product."""
    if (
        not a.is_cuda
        or torch.cuda.get_device_capability(a.device) != (9, 0)
        or not hasattr(F, "grouped_mm")
    ):
        return False
    plain = factor == 1.0 and a.dtype == dtype == torch.bfloat16
    return (
        plain
        and _library_is_faster(a.shape[1], b.shape[1], gathers)
        and all(_is_aligned(x) for x in (a, b))
    )


def _library_is_faster(high: int, wide: int, gathers: int) -> bool:
    other = {GATHER_NONE: LIBRARY_MIN_WIDE_SIDE, GATHER_FIRST: wide, GATHER_SECOND: high}[gathers]
    return min(high, wide) >= LIBRARY_MIN_SIDE and other >= LIBRARY_MIN_WIDE_SIDE


def _is_aligned(x: Tensor) -> bool:
    """Rows of 16 bytes and multiples of them."""
    return (
        x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
    )


def _by_library(a: Tensor, b: Tensor, to: Dispatch, gathers: int) -> Tensor:
    if gathers != GATHER_NONE:
        tokens = to.order_S // to.each
        a, b = (a[tokens], b) if gathers == GATHER_FIRST else (a, b[tokens])
    out: Tensor = F.grouped_mm(a.t(), b, offs=to.bounds[1:].contiguous())
    size = out[0].numel()
    _clear_kernel[(to.experts, max(1, min(64, size // CLEAR_BLOCK)))](
        out, to.bounds, size, CLEAR_BLOCK
    )
    return out


def product_launch(rows: int, width: int, on: torch.device, rank: int = 0) -> ProductLaunch:
    """Of ``_product_kernel``: tiles of ``rows`` rows, a result of ``width`` columns, and an adapter
    of that rank.

    On an H100, 32768 tokens, 128 experts, 8 of them, 2048 x 1536: boxes 659 TFLOP/s, without them
        608; a fourth stage takes 3%
    of it, half the columns 28%.
    """
    columns = min(256 if rows == TALL_TILE_ROWS else 128, max(16, next_power_of_2(width)))
    held = held_columns(rank, on) / STEP_DEPTH if rank else 0
    while columns > 16 and not (_fits(rows, columns, 3, on) and _fits(rows, columns, held, on)):
        columns //= 2
        if columns <= 128 and _fits(rows, columns, 2, on) and _fits(rows, columns, held, on):
            break
    boxes = has_boxes(on)
    return _launch(rows, columns, on, boxes, most=3 if boxes else 4)


def held_columns(rank: int, on: torch.device) -> int:
    """Of an adapter's operands, in a tile: a power of 2, and zeros beyond the rank."""
    most = MAX_ADAPTER_COLUMNS_SMALL if 0 < shared_memory(on) <= 64 << 10 else MAX_ADAPTER_COLUMNS
    return min(most, max(16, next_power_of_2(rank)))


def weight_gradient_launch(
    high: int, wide: int, on: torch.device, gathers: bool = True
) -> ProductLaunch:
    """Of ``_weight_gradient_kernel``. The places of gathered rows are read ahead of the rows,
    which takes two stages and no memory."""
    rows, columns = (
        min(most, max(16, next_power_of_2(size))) for size, most in ((high, 128), (wide, 256))
    )
    boxes = has_boxes(on)
    columns = columns if _fits(rows, columns, 3, on) else min(columns, 128)
    launch = _launch(rows, columns, on, boxes, most=3 if boxes else 4)
    return replace(launch, stages=launch.stages + 2) if gathers and boxes else launch


def has_boxes(on: torch.device) -> bool:
    """Whether the card has Hopper's copy engine."""
    return on.type == "cuda" and torch.cuda.get_device_capability(on) >= (9, 0)


def _launch(rows: int, columns: int, on: torch.device, boxes: bool, most: int) -> ProductLaunch:
    stages = next((stages for stages in range(most, 1, -1) if _fits(rows, columns, stages, on)), 1)
    return ProductLaunch(
        columns, STEP_DEPTH, 8 if rows * columns >= 128 * 256 else 4, stages, boxes=boxes, rows=rows
    )


def _fits(rows: int, columns: int, stages: float, on: torch.device) -> bool:
    """Whether a card has room for so many steps, in 16 bit and with a little for barriers."""
    room = shared_memory(on)
    return not room or stages * (rows + columns) * STEP_DEPTH * 2 + 4096 <= room


def _boxes(
    x: Tensor, w: Tensor, gathers: bool, launch: ProductLaunch, rows: int
) -> tuple[Any, Any, int]:
    """Descriptors of x and of W where the copy engine can fetch their tiles, and which: 1 for x,
    and 2 for a W whose K is dense, 4 for one whose N is."""
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
    """None where its rows do not begin at multiples of 16 bytes."""
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
) -> Tensor:
    """The first product by a launch of one's own; arguments as of ``grouped_product``, and of
    operands in FP8 their ``scales``, the result's ``dtype`` and ``fast`` as of
    ``fp8_grouped_product``."""
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
"""Which operand of a weight gradient has the rows of tokens."""


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
    """The second product by a launch of one's own; arguments as of ``grouped_weight_gradient``."""
    out = a.new_empty(to.experts, a.shape[1], b.shape[1], dtype=dtype)
    into = out
    if gathers == GATHER_SECOND:  # what is gathered is the narrower side of a tile
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
    adapted: Adapted | None = None,
    factor: float = 1.0,
) -> Tensor:
    """``[S, N]``: rows times the weight of their expert.

    Args:
        x: ``[S, K]`` sorted by expert; ``[T, K]`` where ``of_tokens``.
        weight: ``[E, N, K]``, of any strides of which one of N and K is 1.
        bias: ``[E, N]``.
        adapted: added to it.
        factor: of the product alone.
    """
    _check(x, weight, to, of_tokens)
    u, up = (None, None) if adapted is None else adapted
    given = [tensor for tensor in (bias, u) if tensor is not None]
    dense = (
        1 in weight.stride()[1:] and (up is None or up.dtype == x.dtype) and weight.dtype == x.dtype
    )
    if len(to.order_S) and dense and runs_in_16_bit(x, *given):
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
        )
    return grouped_product_reference(x, weight, to, of_tokens, bias, adapted, factor)


def grouped_weight_gradient(
    a: Tensor,
    b: Tensor,
    to: Dispatch,
    of_tokens: int = GATHER_NONE,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``factor · Σ_s a_sᵀ b_s`` over the rows of each expert, ``[E, A, B]``.

    Args:
        a, b: ``[S, A]`` and ``[S, B]`` sorted by expert; of one of them, by ``of_tokens``, ``[T,
            ·]``.
        dtype: of the result; theirs by default.
    """
    dtype = dtype or a.dtype
    if len(to.order_S) and runs_in_16_bit(a, b):
        return _weight_gradient(a, b, to.order_S, to.bounds, to.each, of_tokens, factor, dtype)
    return grouped_weight_gradient_reference(a, b, to, of_tokens, factor, dtype)


def _check(x: Tensor, weight: Tensor, to: Dispatch, of_tokens: bool) -> None:
    rows = len(to.order_S) // to.each if of_tokens else len(to.order_S)
    if (
        x.ndim != 2
        or weight.ndim != 3
        or x.shape != (rows, weight.shape[2])
        or len(weight) != to.experts
    ):
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}: expected [{rows}, K] and "
            f"[{to.experts}, N, K]"
        )


def _rows(x: Tensor, to: Dispatch, of_tokens: bool) -> Tensor:
    return x[to.order_S.long() // to.each] if of_tokens else x


def grouped_product_reference(
    x: Tensor,
    weight: Tensor,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: Adapted | None = None,
    factor: float = 1.0,
) -> Tensor:
    """One product an expert, whose numbers of rows the host reads."""
    bounds = to.bounds.tolist()
    rows = _rows(x, to, of_tokens)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_empty(len(rows), weight.shape[1])
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin == end:
            continue
        total = factor * (rows[begin:end].to(wide) @ weight[expert].to(wide).t())
        if adapted is not None:
            total += adapted.u_SR[begin:end].to(wide) @ adapted.up_ENR[expert].to(wide).t()
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
    a = _rows(a, to, of_tokens == GATHER_FIRST)
    b = _rows(b, to, of_tokens == GATHER_SECOND)
    bounds = to.bounds.tolist()
    wide = torch.promote_types(a.dtype, torch.float32)
    out = a.new_zeros(to.experts, a.shape[1], b.shape[1], dtype=dtype or a.dtype)
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin < end:
            out[expert] = factor * (a[begin:end].to(wide).t() @ b[begin:end].to(wide))
    return out
