"""Grouped products: rows sorted by expert times the weight of their expert.

    y_s = c · x_s W[e_s]ᵀ + u_s B[e_s]ᵀ + b[e_s]      (u and B of an adapter, b a bias, c a factor)

The kernel can gather rows of x from tokens: row s is then token ``order[s] // k``, so the k copies
of a token never exist in memory. dx = dy W is the same product with ``W.transpose(1, 2)``; dW is in
``grouped_weight_gradient.py``. Sums are fp32, each in one order, without atomics. The host never
waits, and no expert has a limit on its rows. The FP8 form, with scales of rows and of experts, is in
``fp8_grouped_product.py``.

Floor at S rows: ``2 · S · N · K`` FLOP; bytes in 16 bit: ``2 · (S · K + E · N
· K + S · N)``. Tiles of an expert follow each other, so its rows and its weight stay in the L2
cache.

Shapes: S pairs of token and expert, E experts, K inputs, N outputs, R rank of an adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.expert_dispatch import TALL_TILE_ROWS, Dispatch
from chronicals.kernels.grouped_launch import (
    STEP_DEPTH,
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
    multiprocessors,
    next_power_of_2,
    operator,
    runs_in_16_bit,
    tl,
    triton,
)
from chronicals.kernels.low_rank_term import (
    LowRankTerm,
    held_columns,
    low_rank_strides,
    low_rank_term,
)


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
    """Compute tiles of the product.

    ``BOXES``, from ``_boxes``, says which of x and w the copy engine loads; the other is loaded
    through pointers. ``KIND`` and ``THIN`` are the dtypes of the main product and of the adapter's.
    ``SCALED``: x has scales of rows and w of experts. ``FAST``: sums in FP8 stay in the tensor
    cores' accumulators, which have fewer bits than fp32, along all of K.
    """
    steps: tl.constexpr = None if FAST else DEPTH
    columns = tl.cdiv(width, COLUMNS)
    for number in range(tl.program_id(0), tiles * columns, tl.num_programs(0)):
        tile, block = tile_of(number, tiles, columns, GROUP)
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
        fits(rows, columns, 3, on) and fits(rows, columns, adapter_stages, on)
    ):
        columns //= 2
        if (
            columns <= 128
            and fits(rows, columns, 2, on)
            and fits(rows, columns, adapter_stages, on)
        ):
            break
    boxes = has_boxes(on)
    return staged_launch(rows, columns, on, boxes, most=3 if boxes else 4)


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
    of_x = box_of(x, (rows, launch.depth)) if not gathers else None
    dense_k = w.stride(2) == 1
    of_w = (
        box_of(w, (1, launch.columns, launch.depth))
        if dense_k
        else box_of(w.transpose(1, 2), (1, launch.depth, launch.columns))
    )
    return of_x, of_w, (of_x is not None) + (0 if of_w is None else 2 if dense_k else 4)


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
    """Compute the product with a given launch.

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
        *low_rank_strides(u, up),
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
    places = range(to.experts) if slots is None else slots.tolist()
    rows = x[to.order_S.long() // to.each] if of_tokens else x
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_empty(len(rows), weight.shape[1])
    for expert, span in to.spans():
        own = rows[span].to(wide, copy=True)
        total = factor * (own @ weight[places[expert]].to(wide).t())
        if adapted is not None:
            u = adapted.u_SR[span].to(wide, copy=True)
            total += u @ adapted.up_ENR[expert].to(wide).t()
        y[span] = total if bias is None else total + bias[expert]
    return y
