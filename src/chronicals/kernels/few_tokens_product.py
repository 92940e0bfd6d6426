"""Grouped products of few tokens, for which only the experts that they chose are read, in place.

    y_s = x_s W[e_s]ᵀ + u_s B[e_s]ᵀ + b[e_s]        rows sorted by expert; u and B of an adapter, b a bias

A decode step sends few tokens to a mixture, so the bytes of the chosen experts are what its
products cost. Weights in FP8, MXFP4, NF4 or GGUF blocks are dequantised inside the product; through
dense weights all E experts would be, 2.5 bytes written and read a value (Frantar et al., 2024,
MARLIN, arXiv 2408.11743). Values are those that ``expert_stacks.py`` describes, rounded to the dtype
of x, but those in FP8, whose scales multiply the sums of their blocks in fp32.

Experts may lie in slots of a smaller stack: ``slot_of_expert`` is then a map on the device, which
the host need not know. Shapes are static and the host never waits, so CUDA graphs can capture it.

Shapes: T tokens, S pairs of token and expert, E experts, K columns, N outputs, R rank. x and y are
bf16 or fp16, sums are fp32, in one order, which no slot and no other expert affects. Bytes that must
move: those of the chosen experts and 2 · S · (K + N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.expert_dispatch import Dispatch
from chronicals.kernels.expert_stacks import (
    FORMAT_4_BIT,
    FORMAT_16_BIT,
    FORMAT_FP8,
    FORMAT_GGUF,
    FP8_SCALE_COLUMNS,
    ExpertStack,
    Layout,
)
from chronicals.kernels.launch import (
    compiled_once,
    in_rows,
    kernel_constant,
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
)
from chronicals.kernels.low_rank_term import (
    LowRankTerm,
    held_columns,
    low_rank_strides,
    low_rank_term,
)
from chronicals.kernels.nf4 import CODE_VALUES, code_of
from chronicals.kernels.nf4_product import LEAST_ROWS, MOST_ROWS, table_for
from chronicals.kernels.weight_tile import FP8_SCALE_OF_BITS, weight_tile

COLUMNS_AT_ONCE = FP8_SCALE_COLUMNS
"""Columns of a step: 256 bytes of a row in 16 bit, 128 in FP8, 64 in 4 bits; a block of FP8."""

GGUF_COLUMNS_AT_ONCE = 64
"""Columns of a step in GGUF blocks, whose bytes are loaded one by one, as in ``gguf_product.py``."""

MOST_ROWS_AT_ONCE = 32
"""Rows that are multiplied at once, at most. From 64 on Hopper's tensor cores multiply by other
instructions, and a row's bits would depend on how many others its launch has.
"""

MOST_OUTPUTS, LEAST_OUTPUTS = 64, 16
"""Outputs of a program, the largest and the smallest power of 2."""

PROGRAMS_A_MULTIPROCESSOR = 2
"""Programs that are wanted on each multiprocessor. With 8 experts of 1536 outputs an H200 gets 384
of 32 outputs, 3 on each of its 132 multiprocessors, where 192 of 64 would leave half of them with
one. Not measured on a card.
"""

_FP8 = kernel_constant(FORMAT_FP8)
_OF_BITS = kernel_constant(FP8_SCALE_OF_BITS)


@dataclass(frozen=True)
class FewTokensLaunch:
    """The launch of the kernel.

    Attributes:
        rows: rows that are multiplied at once.
        outputs: outputs of a program.
        columns: columns of a step of the sum.
        stages: Triton's ``num_stages``.
    """

    rows: int
    outputs: int
    columns: int
    stages: int = 3


@compiled_once(sizes=("tiles", "experts"), places=("order_ptr",))
def _few_tokens_kernel(
    # read: rows; weight or codes, scales, scales' scales, what codes of both stand for
    x_ptr,
    w_ptr,
    scale_ptr,
    second_ptr,
    code2_ptr,
    offset_ptr,
    code_ptr,
    # read: bias, adapter, slots of experts; each may be None
    bias_ptr,
    u_ptr,
    up_ptr,
    slots_ptr,
    # written
    y_ptr,
    # read: the dispatch (expert_dispatch.py)
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    # sizes: tiles, N, K, experts of a token, experts
    tiles,
    outputs,
    depth,
    each,
    experts,
    # strides, in elements
    x_row,
    w_slot,
    w_row,
    w_column,
    scale_slot,
    scale_row,
    second_slot,
    blocks_before,
    bias_slot,
    u_stride,
    up_stride_e,
    up_stride_n,
    up_stride_r,
    # options; RANK is 0 without an adapter
    GATHERS: tl.constexpr,
    MAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    HELD: tl.constexpr,
    # of ``Layout``
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    NESTED: tl.constexpr,
    # dtype of the products, look-ups of codes
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    # rows of a tile of the dispatch, and the tile that is multiplied at once
    TALL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply the rows of a tile of the dispatch by some outputs of its expert."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    has_rows = expert < experts
    if MAPPED:
        # Of an expert without a slot nothing is read, and nothing is written for it.
        slot = tl.load(slots_ptr + expert, mask=has_rows, other=-1).to(tl.int64)
        has_rows &= slot >= 0
    else:
        slot = expert.to(tl.int64)
    if has_rows:
        first = tl.load(tiles_ptr + tiles + tile)
        end = tl.minimum(tl.load(bounds_ptr + expert + 1), first + TALL)
        output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < outputs
        column = tl.arange(0, COLUMNS)
        for begin in range(first, end, ROWS):
            row = begin + tl.arange(0, ROWS)
            # Rows beyond the tile's end repeat its last one and are not stored.
            taken = tl.minimum(row, end - 1)
            source = tl.load(order_ptr + taken) // each if GATHERS else taken
            x_at = x_ptr + source.to(tl.int64)[:, None] * x_row + column[None, :]
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for step in range(0, depth, COLUMNS):
                x = tl.load(x_at + step, mask=(step + column < depth)[None, :], other=0.0)
                w = weight_tile(
                    w_ptr + slot * w_slot,
                    scale_ptr + slot * scale_slot,
                    second_ptr + slot * second_slot,
                    code2_ptr,
                    offset_ptr,
                    code_ptr,
                    output,
                    is_output,
                    step,
                    depth,
                    w_row,
                    w_column,
                    scale_row,
                    slot * blocks_before,
                    FORMAT,
                    BLOCK,
                    SECOND,
                    NESTED,
                    x.dtype,
                    TABLE,
                    OUTPUTS,
                    COLUMNS,
                )
                if FORMAT == _FP8:
                    at = scale_ptr + slot * scale_slot + output // SECOND * scale_row
                    scale = tl.load(at + step // BLOCK, mask=is_output, other=0.0)
                    part = tl.dot(x.to(KIND), tl.trans(w.to(KIND)))
                    total += part * (scale * _OF_BITS)[None, :]
                else:
                    total = tl.dot(x.to(KIND), tl.trans(w.to(KIND)), total)
            total = low_rank_term(
                total,
                u_ptr,
                up_ptr,
                taken,
                expert,
                output,
                outputs,
                u_stride,
                up_stride_e,
                up_stride_n,
                up_stride_r,
                RANK,
                HELD,
                KIND,
            )
            if HAS_BIAS:
                bias = tl.load(bias_ptr + slot * bias_slot + output, mask=is_output, other=0.0)
                total += bias.to(tl.float32)[None, :]
            tl.store(
                y_ptr + row.to(tl.int64)[:, None] * outputs + output[None, :],
                total.to(y_ptr.dtype.element_ty),
                mask=(row < end)[:, None] & is_output[None, :],
            )


def few_tokens_launch(
    pairs: int, experts: int, tall: int, layout: Layout, on: torch.device
) -> FewTokensLaunch:
    """Choose the launch from the shape and the card.

    Args:
        pairs: S.
        experts: E.
        tall: rows of a tile of the dispatch.
        layout: the layout of the weights.
        on: the device.
    """
    outputs = MOST_OUTPUTS
    wanted = PROGRAMS_A_MULTIPROCESSOR * multiprocessors(on)
    # no more experts are chosen than there are pairs
    chosen = min(pairs, experts)
    while outputs > LEAST_OUTPUTS and chosen * triton.cdiv(layout.outputs, outputs) < wanted:
        outputs //= 2
    columns = GGUF_COLUMNS_AT_ONCE if layout.format == FORMAT_GGUF else COLUMNS_AT_ONCE
    return FewTokensLaunch(rows_at_once(pairs, experts, tall), outputs, columns)


def rows_at_once(pairs: int, experts: int, tall: int) -> int:
    """Return the rows that are multiplied at once: twice the mean of an expert, a power of 2.

    An expert with more is read again, mostly from the L2 cache, for each such number of rows.

    Args:
        pairs: S.
        experts: E.
        tall: rows of a tile of the dispatch.
    """
    wanted = next_power_of_2(2 * -(-pairs // experts))
    return min(tall, MOST_ROWS_AT_ONCE, max(LEAST_ROWS, wanted))


@operator("chronicals::few_tokens_product")
def _product(
    x: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    slots: Tensor | None,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    tall: int,
    gathers: bool,
    bias: Tensor | None,
    u: Tensor | None,
    up: Tensor | None,
) -> Tensor:
    """Launch the product; ``tensors`` and ``layout`` are those of the stack."""
    of = Layout(*layout)
    pairs = len(order)
    experts = len(bounds) - 1
    most = tiles.shape[1]
    rank = 0 if up is None else up.shape[2]
    code = list(CODE_VALUES)[of.code]
    launch = few_tokens_launch(pairs, experts, tall, of, x.device)
    y = x.new_empty((pairs, of.outputs))
    # a tile in use has a row, so that no more are in use than there are rows
    grid = triton.cdiv(of.outputs, launch.outputs), min(most, pairs)
    _few_tokens_kernel[grid](
        x,
        *tensors,
        *[tensors[0]] * (5 - len(tensors)),
        code_of(code, x.device),
        bias,
        u,
        up,
        slots,
        y,
        order,
        bounds,
        tiles,
        most,
        of.outputs,
        of.columns,
        each,
        experts,
        x.stride(0),
        of.slot,
        of.row,
        of.column,
        of.scale_slot,
        of.scale_row,
        of.second_slot,
        of.blocks_before,
        0 if bias is None else bias.stride(0),
        *low_rank_strides(u, up),
        gathers,
        slots is not None,
        bias is not None,
        rank,
        held_columns(rank, x.device),
        of.format,
        of.block,
        of.second,
        bool(of.nested),
        multiplied_in(x.dtype),
        table_for(x, code) if of.format == FORMAT_4_BIT else "",
        tall,
        launch.rows,
        launch.outputs,
        launch.columns,
        num_warps=4,
        num_stages=launch.stages,
        # nested scales are those of ``dequantize_4bit`` and values of GGUF are ggml's, bit by bit
        enable_fp_fusion=False,
    )
    return y


@torch.library.register_fake(_product)
def _(
    x: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    slots: Tensor | None,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    tall: int,
    gathers: bool,
    bias: Tensor | None,
    u: Tensor | None,
    up: Tensor | None,
) -> Tensor:
    return x.new_empty((len(order), Layout(*layout).outputs))


def are_few_tokens(x: Tensor, to: Dispatch) -> bool:
    """Return whether ``few_tokens_product`` is the way to multiply these rows.

    They are in 16 bit, on a card, and of at most ``MOST_ROWS`` tokens: with more, experts have so
    many rows that products are better over dense weights.

    Args:
        x: ``[S, K]`` or ``[T, K]``.
        to: the dispatch of the rows.
    """
    return len(to.order_S) > 0 and to.tokens <= MOST_ROWS and multiplies_few_tokens(x)


def multiplies_few_tokens(x: Tensor) -> bool:
    """Return whether the kernel runs on the dtype and the device of ``x``."""
    return x.dtype in (torch.bfloat16, torch.float16) and runs_triton(x)


def few_tokens_product(
    x: Tensor,
    stack: ExpertStack,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: LowRankTerm | None = None,
    slot_of_expert: Tensor | None = None,
) -> Tensor:
    """Multiply each row with the weight of its expert; without a gradient.

    Rows in another dtype than bf16 and fp16, or not on a card, go to the reference.

    Args:
        x: ``[S, K]`` sorted by expert, or ``[T, K]`` if ``of_tokens``.
        stack: the weights.
        to: the dispatch of the rows.
        of_tokens: gather the rows of x from tokens.
        bias: ``[slots, N]``, in the slots of the stack.
        adapted: the adapter's part, added to the result; B is ``[E, N, R]``, not in slots.
        slot_of_expert: int32 ``[E]``, the slot of each expert, on the device of x; by default the
            stack has a slot for each expert, in their order. −1 stands for an expert that is in no
            slot. None of the rows may be of such an expert: what they get is undefined, and the
            reference raises.

    Returns:
        ``[S, N]`` in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    layout = stack.layout
    rows = to.tokens if of_tokens else len(to.order_S)
    if x.shape != (rows, layout.columns):
        raise ValueError(f"x is {tuple(x.shape)}: expected {(rows, layout.columns)}")
    if slot_of_expert is None and layout.slots != to.experts:
        raise ValueError(
            f"the stack has {layout.slots} slots for {to.experts} experts: give slot_of_expert"
        )
    if slot_of_expert is not None and (
        slot_of_expert.shape != (to.experts,) or slot_of_expert.dtype != torch.int32
    ):
        raise ValueError(
            f"slot_of_expert is {slot_of_expert.dtype} {tuple(slot_of_expert.shape)}: expected "
            f"torch.int32 {(to.experts,)}"
        )
    if bias is not None and bias.shape != (layout.slots, layout.outputs):
        raise ValueError(f"bias is {tuple(bias.shape)}: expected {(layout.slots, layout.outputs)}")
    tensors = stack.tensors
    u, up = (None, None) if adapted is None else adapted
    of_x = [tensors[0]] if layout.format == FORMAT_16_BIT else []
    kinds = {tensor.dtype for tensor in (*of_x, u, up) if tensor is not None}
    if multiplies_few_tokens(x) and kinds - {x.dtype}:
        raise ValueError(f"x is {x.dtype}, weights or adapter {kinds}: give one dtype")
    if not len(to.order_S) or not multiplies_few_tokens(x):
        return few_tokens_product_reference(x, stack, to, of_tokens, bias, adapted, slot_of_expert)
    y: Tensor = _product(
        in_rows(x),
        tensors,
        layout,
        None if slot_of_expert is None else slot_of_expert.contiguous(),
        to.order_S,
        to.bounds,
        to.tiles,
        to.each,
        to.rows,
        of_tokens,
        None if bias is None else in_rows(bias),
        None if u is None else in_rows(u),
        up,
    )
    return y


def few_tokens_product_reference(
    x: Tensor,
    stack: ExpertStack,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: LowRankTerm | None = None,
    slot_of_expert: Tensor | None = None,
) -> Tensor:
    """Compute ``few_tokens_product`` in plain torch, expert by expert; the host waits for the counts.

    Raises:
        ValueError: a row is of an expert that is in no slot.
    """
    slots = range(to.experts) if slot_of_expert is None else slot_of_expert.tolist()
    rows = x[to.order_S.long() // to.each] if of_tokens else x
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_empty(len(rows), stack.layout.outputs)
    for expert, span in to.spans():
        slot = slots[expert]
        if not 0 <= slot < stack.layout.slots:
            raise ValueError(
                f"expert {expert} has {span.stop - span.start} rows and slot {slot} of {stack.layout.slots}: "
                "copy it to a slot first"
            )
        total = rows[span].to(wide) @ stack.dense(slot, x.dtype).to(wide).t()
        if adapted is not None:
            total += adapted.u_SR[span].to(wide) @ adapted.up_ENR[expert].to(wide).t()
        y[span] = total if bias is None else total + bias[slot]
    return y
