"""Products of few rows with a dense weight, with what stands before and behind them in a layer.

    y[r, n] = Σ_k x̂[r, k] · W[n, k] + b[n]                                   x̂ = x
    x̂[r, k] = s[r, k] · rstd[r] · (offset + w[k])                           with a norm before it
    u[r, f] = a(y[r, f]) · y[r, F + f]                                      with a gated unit behind it
    t[r, n] = residual[r, n] + y[r, n]                                      with an addition behind it

A decode step asks each weight of a layer for one row of each sequence. Of a small model the bytes of
a weight take an H200 one to four microseconds, as much as the launch of a kernel. So norm, unit and
addition are no kernels of their own here, and a launch does not wait for the one before it: its
programs begin to read the weight while that one still runs (programmatic dependent launch, CUDA
programming guide, section "Programmatic Dependent Launch and Synchronization"). Nothing but the
weight is read, and nothing is written, before the kernel before it has ended.

The norm is RMSNorm (``rmsnorm.py``). A program needs the sum of squares of whole rows of s, but reads
some columns: whoever adds to the residual writes the sums of squares of its columns for the norm that
follows, ``[P, R]`` of P programs, which are added in their order.

Everything is rounded where separate kernels round: x̂, y before the unit, and y before the addition
unless that stays in fp32.

Shapes: R rows, at most ``MOST_ROWS``; K columns; N outputs, of a gated unit N = 2 F. x and W are bf16
or fp16, sums are fp32; s, the residual and t are fp32 or as x. Bytes that must move: 2 · N · K +
(2 or 4) · R · K + those of what is returned. The columns are split among programs where N is too small to
fill a card; the splits are summed in a fixed order.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.glu import REFERENCES, activate
from chronicals.kernels.launch import (
    early_options,
    in_rows,
    launches_early,
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
    wait_for_kernel_before,
)
from chronicals.kernels.nf4_product import arrivals

MOST_ROWS = 64
"""Rows up to which the weight's bytes are most of the cost."""

LEAST_ROWS = 16
"""Rows of the smallest product of tensor cores: rows of a program are padded to them."""

OUTPUTS = (64, 32, 16)
"""Outputs of a program: the most with which there is a program for each multiprocessor, else the
fewest, so that each program reads little.
"""

STAGE_BYTES = 32 << 10
"""Bytes of rows and weight that are read at once, at most.

Three such stages leave room for a program of the next kernel on a multiprocessor, and fit cards with 99
KiB for a program.
"""

COLUMNS_OF_A_SPLIT = 256
"""Fewest columns that are worth a split."""

PROGRAMS_A_MULTIPROCESSOR = 2
"""Programs that are wanted on each multiprocessor, so that one reads while another multiplies."""

LINE = 64
"""Values of 16 bits in a line of the L2 cache, 128 bytes."""


@dataclass(frozen=True)
class FewRowsTile:
    """The launch of the kernel.

    Attributes:
        rows: rows of a program, padded to a power of 2.
        outputs: outputs of a program; of a gated unit so many of gate and of up.
        columns: columns that are multiplied at once.
        splits: programs among which the columns are split; a power of 2.
        warps: warps of a program.
        stages: how many times ``columns`` are being read.
    """

    rows: int
    outputs: int
    columns: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm of the rows of x before a product.

    Attributes:
        squares: fp32 ``[P, R]``, sums of squares of some columns of each row, whose sum over P is
            that of the row.
        weight: ``[K]``, or None.
        epsilon: added to the mean of the squares.
        offset: added to the weight.
    """

    squares: Tensor
    weight: Tensor | None
    epsilon: float
    offset: float = 0.0


def few_rows_tile(x_RK: Tensor, outputs: int, activation: str | None = None) -> FewRowsTile:
    """Choose the launch from the shape and the card.

    Args:
        x_RK: the rows.
        outputs: N.
        activation: that of a gated unit, whose columns are not split; or None.
    """
    rows, columns = x_RK.shape
    padded = max(LEAST_ROWS, next_power_of_2(rows))
    wanted = multiprocessors(x_RK.device)
    made = outputs if activation is None else outputs // 2
    each = next((n for n in OUTPUTS if triton.cdiv(made, n) >= wanted), OUTPUTS[-1])
    weights = each if activation is None else 2 * each
    column_bytes = padded * x_RK.element_size() + weights * 2
    at_once = 128 if 128 * column_bytes <= STAGE_BYTES else 64
    splits = 1
    if activation is None:
        room = PROGRAMS_A_MULTIPROCESSOR * wanted // triton.cdiv(made, each)
        splits = max(1, min(room, columns // COLUMNS_OF_A_SPLIT))
    return FewRowsTile(padded, each, at_once, next_power_of_2(splits + 1) // 2)


@triton.jit
def _prefetch_weight(
    weight_ptr,
    output,
    is_output,
    begin,
    end,
    stride,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
):
    """Let the L2 cache read a program's columns of some outputs."""
    column = begin + tl.arange(0, LINES) * LINE
    at = output[:, None] * stride + column[None, :]
    inside = is_output[:, None] & (column < end)[None, :]
    address = (weight_ptr + tl.where(inside, at, 0)).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _few_rows_product_kernel(
    # read before the kernel before this one has ended
    weight_ptr,
    # read: rows, bias, weight of the norm, sums of squares, residual
    x_ptr,
    bias_ptr,
    norm_ptr,
    squares_ptr,
    residual_ptr,
    # written: the result, its sums of squares, sums of each split, and how many of a tile are done
    out_ptr,
    out_squares_ptr,
    parts_ptr,
    arrived_ptr,
    # sizes: rows, columns, outputs (of a gated unit F), programs that wrote squares; strides of rows
    rows,
    columns,
    outputs,
    writers,
    x_row,
    weight_row,
    residual_row,
    epsilon,
    offset,
    # options
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    # tile, and programs that wrote squares as a power of 2
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WRITERS: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
):
    tile = tl.program_id(0)
    output = tile.to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    row = tl.arange(0, ROWS)
    is_row = row < rows
    column = tl.arange(0, COLUMNS)
    each = tl.cdiv(tl.cdiv(columns, SPLITS), COLUMNS) * COLUMNS
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, columns)
    if EARLY:
        _prefetch_weight(weight_ptr, output, is_output, begin, end, weight_row, LINES, LINE)
        if ACTIVATION != "":
            _prefetch_weight(
                weight_ptr, outputs + output, is_output, begin, end, weight_row, LINES, LINE
            )
    wait_for_kernel_before(EARLY)

    rstd = tl.zeros((ROWS,), tl.float32)
    if HAS_NORM:
        writer = tl.arange(0, WRITERS)
        squares = tl.load(
            squares_ptr + writer[:, None] * rows + row[None, :],
            mask=(writer < writers)[:, None] & is_row[None, :],
            other=0.0,
        )
        rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / columns + epsilon)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for some in range(begin, end, COLUMNS):
        is_column = some + column < end
        exists = is_output[:, None] & is_column[None, :]
        at = weight_ptr + output[:, None] * weight_row + (some + column)[None, :]
        weight = tl.load(at, mask=exists, other=0.0)
        x = tl.load(
            x_at + (some + column)[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
        )
        if HAS_NORM:
            x = x.to(tl.float32) * rstd[:, None]
            if HAS_NORM_WEIGHT:
                factor = tl.load(norm_ptr + some + column, mask=is_column, other=0.0)
                x *= factor.to(tl.float32)[None, :] + offset
            x = x.to(weight.dtype)
        total = tl.dot(x.to(KIND), tl.trans(weight.to(KIND)), total)
        if ACTIVATION != "":
            at = weight_ptr + (outputs + output)[:, None] * weight_row + (some + column)[None, :]
            weight = tl.load(at, mask=exists, other=0.0)
            up = tl.dot(x.to(KIND), tl.trans(weight.to(KIND)), up)

    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    exists = is_row[:, None] & is_output[None, :]
    is_last = True
    if SPLITS > 1:
        count = rows * outputs
        tl.store(parts_ptr + tl.program_id(1) * count + place, total, mask=exists)
        tl.debug_barrier()  # one thread tells of the stores of all
        is_last = tl.atomic_add(arrived_ptr + tile, 1) == SPLITS - 1
        if is_last:
            total = tl.zeros_like(total)
            for split in tl.static_range(SPLITS):
                # past the L1 cache, where another multiprocessor's stores are not seen
                total += tl.load(
                    parts_ptr + split * count + place,
                    mask=exists,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(arrived_ptr + tile, 0)
    if is_last:
        kind = weight_ptr.dtype.element_ty
        if HAS_BIAS:
            bias = tl.load(bias_ptr + output, mask=is_output, other=0.0)
            total += bias.to(tl.float32)[None, :]
        if ACTIVATION != "":
            if HAS_BIAS:
                bias = tl.load(bias_ptr + outputs + output, mask=is_output, other=0.0)
                up += bias.to(tl.float32)[None, :]
            gate, _ = activate(total.to(kind).to(tl.float32), ACTIVATION)
            total = gate * up.to(kind).to(tl.float32)
        if ADDS:
            if ROUNDS:
                total = total.to(kind).to(tl.float32)
            residual = tl.load(
                residual_ptr + row.to(tl.int64)[:, None] * residual_row + output[None, :],
                mask=exists,
                other=0.0,
            )
            total = residual.to(tl.float32) + total
            if ROUNDS:
                total = total.to(kind).to(tl.float32)
        y = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, y, mask=exists)
        if ADDS:
            y = tl.where(exists, y.to(tl.float32), 0.0)
            tl.store(out_squares_ptr + tile * rows + row, tl.sum(y * y, axis=1), mask=is_row)


@operator("chronicals::few_rows_product")
def _few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    squares: Tensor | None,
    epsilon: float,
    offset: float,
    activation: str,
    residual: Tensor | None,
    dtype: torch.dtype,
    tile: list[int],
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return the result and its sums of squares, which are empty without them.

    Args:
        x: ``[R, K]`` with dense rows.
        weight: ``[N, K]`` with dense rows.
        bias: ``[N]``, or None.
        norm_weight: weight of the norm, or None.
        squares: sums of squares of x ``[P, R]``; None without a norm.
        epsilon: that of the norm.
        offset: that of the norm.
        activation: that of a gated unit, or empty.
        residual: ``[R, N]``, to which the product is added; or None.
        dtype: of the result.
        tile: the values of ``FewRowsTile``.
    """
    out, out_squares = _results(
        x,
        weight,
        bias,
        norm_weight,
        squares,
        epsilon,
        offset,
        activation,
        residual,
        dtype,
        tile,
    )
    launch = FewRowsTile(*tile)
    rows, columns = x.shape
    outputs = out.shape[1]
    if not out.numel():
        return out, out_squares
    parts = arrived = out  # not read
    if launch.splits > 1:
        parts = x.new_empty((launch.splits, out.numel()), dtype=torch.float32)
        arrived = arrivals(x.device)
        assert triton.cdiv(outputs, launch.outputs) <= len(arrived)
    early = launches_early(x)
    writers = 1 if squares is None else len(squares)
    split_columns = triton.cdiv(columns, launch.splits)
    _few_rows_product_kernel[triton.cdiv(outputs, launch.outputs), launch.splits](
        weight,
        x,
        bias,
        norm_weight,
        squares,
        residual,
        out,
        out_squares,
        parts,
        arrived,
        rows,
        columns,
        outputs,
        writers,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        epsilon,
        offset,
        bias is not None,
        squares is not None,
        norm_weight is not None,
        activation,
        residual is not None,
        residual is not None and residual.dtype == weight.dtype,
        early,
        multiplied_in(weight.dtype),
        launch.rows,
        launch.outputs,
        launch.columns,
        next_power_of_2(writers),
        launch.splits,
        next_power_of_2(triton.cdiv(split_columns + launch.columns, LINE)),
        LINE,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **early_options(early),
    )
    return out, out_squares


@torch.library.register_fake(_few_rows_product)
def _results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    squares: Tensor | None,
    epsilon: float,
    offset: float,
    activation: str,
    residual: Tensor | None,
    dtype: torch.dtype,
    tile: list[int],
) -> tuple[Tensor, Tensor]:
    """Allocate the results."""
    outputs = len(weight) // 2 if activation else len(weight)
    out = weight.new_empty((len(x), outputs), dtype=dtype)
    writers = 0 if residual is None else -(-outputs // FewRowsTile(*tile).outputs)
    return out, x.new_empty((writers, len(x)), dtype=torch.float32)


def takes_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes these rows and this weight.

    The weight is 16 bit and both are on a card (any dtype in the interpreter), with at most
    ``MOST_ROWS`` rows.

    Args:
        x: ``[R, K]``.
        weight: ``[N, K]``.
    """
    dense = x.stride(-1) == 1 and weight.stride(-1) == 1
    if len(x) > MOST_ROWS or not dense or not runs_triton(x, weight):
        return False
    if not x.is_cuda or weight.dtype == torch.float16:
        return True
    # bf16 is multiplied by tensor cores from Ampere (sm_80) on; fp32 on a card is for proofs
    has_bf16 = torch.cuda.get_device_capability(x.device) >= (8, 0)
    return has_bf16 and weight.dtype == torch.bfloat16


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    activation: str | None = None,
    tile: FewRowsTile | None = None,
) -> Tensor:
    """Multiply few rows by a weight, after a norm and before a gated unit if wanted; no gradient.

    Args:
        x: ``[R, K]``, in the dtype of the weight, or fp32 if ``norm`` is given.
        weight: ``[N, K]``; of a gated unit the rows of gate, then those of up.
        bias: ``[N]``, or None.
        norm: RMSNorm of the rows of x.
        activation: "silu", "gelu" or "gelu_tanh" for a gated unit.
        tile: the launch; by default chosen.

    Returns:
        ``[R, N]``, or ``[R, N / 2]`` of a gated unit, in the dtype of the weight.

    Raises:
        ValueError: sizes or dtypes do not fit, or ``tile`` splits the columns of a gated unit.
    """
    _check(x, weight)
    if norm is None:
        _check_dtype(x, weight)
    elif norm.squares.shape[1] != len(x):
        raise ValueError(f"norm.squares are of {norm.squares.shape[1]} rows, x has {len(x)}")
    if not takes_few_rows(x, weight):
        return few_rows_product_reference(x, weight, bias, norm=norm, activation=activation)
    tile = tile or few_rows_tile(x, len(weight), activation)
    if activation is not None and tile.splits > 1:
        raise ValueError(
            f"tile.splits={tile.splits}: the columns of a gated unit are not split; give splits=1"
        )
    return _launched(x, weight, bias, norm, activation, None, weight.dtype, tile)[0]


def few_rows_sum(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tile: FewRowsTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply few rows by a weight and add the product to a residual; no gradient.

    Args:
        x: ``[R, K]``, in the dtype of the weight.
        weight: ``[N, K]``.
        residual: ``[R, N]``, in fp32, in which product and sum stay then, or in the dtype of the
            weight, to which both are rounded.
        bias: ``[N]``, or None.
        dtype: of the result, fp32 or that of the weight; by default that of the residual.
        tile: the launch; by default chosen.

    Returns:
        The sum ``[R, N]``, and the sums of squares of its columns, fp32 ``[P, R]``, for a
        ``RowNorm``.

    Raises:
        ValueError: sizes or dtypes do not fit.
    """
    _check(x, weight)
    _check_dtype(x, weight)
    if residual.shape != (len(x), len(weight)):
        raise ValueError(f"residual is {list(residual.shape)}, the product {[len(x), len(weight)]}")
    if not takes_few_rows(x, weight):
        return few_rows_sum_reference(x, weight, residual, bias, dtype=dtype)
    tile = tile or few_rows_tile(x, len(weight))
    rows = in_rows(residual)
    return _launched(x, weight, bias, None, None, rows, dtype or residual.dtype, tile)


def _check(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless x has as many columns as the weight."""
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[1]} columns, the weight {weight.shape[1]}")


def _check_dtype(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless x has the dtype of the weight."""
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.dtype}: give x in that of the weight")


def _launched(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: RowNorm | None,
    activation: str | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    tile: FewRowsTile,
) -> tuple[Tensor, Tensor]:
    """Call the operator, with vectors and sums of squares without gaps, as the kernel reads them."""
    norm_weight = squares = None
    if norm is not None:
        norm_weight = None if norm.weight is None else norm.weight.contiguous()
        squares = norm.squares.contiguous()
    results: tuple[Tensor, Tensor] = _few_rows_product(
        x,
        weight,
        None if bias is None else bias.contiguous(),
        norm_weight,
        squares,
        0.0 if norm is None else norm.epsilon,
        0.0 if norm is None else norm.offset,
        activation or "",
        residual,
        dtype,
        list(astuple(tile)),
    )
    return results


def few_rows_product_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    activation: str | None = None,
) -> Tensor:
    """Compute what ``few_rows_product`` does in plain torch."""
    if norm is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = norm.squares.to(wide).sum(0)
        x = x.to(wide) * (squares / x.shape[1] + norm.epsilon).rsqrt()[:, None]
        if norm.weight is not None:
            x = x * (norm.weight.to(wide) + norm.offset)
        x = x.to(weight.dtype)
    y = F.linear(x, weight, bias)
    if activation is None:
        return y
    gate, up = y.chunk(2, dim=1)
    return REFERENCES[activation](gate, up)


def few_rows_sum_reference(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what ``few_rows_sum`` does in plain torch; all squares are one sum."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    product = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    total = (residual + product.to(residual.dtype)).to(dtype or residual.dtype)
    return total, total.to(wide).square().sum(1)[None]
