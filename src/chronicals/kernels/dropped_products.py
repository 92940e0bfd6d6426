"""Products of a tensor under dropout with the thin matrices of an adapter.

The mask of the dropout (Srivastava et al., 2014) is never in memory:

    u = drop(x) Aᵀ        dA = gᵀ drop(x)        dx += drop(g A)        drop(x) = m ∘ x / (1 − p)

The mask m is a hash of a seed and of the element's place (``lowbias32``). Forward and
backward compute the same one, so it is not saved. p is rounded to a multiple of 1/65536, also in
1 − p. ``x`` is ``[T, D]``, A ``[r, D]``, g and u ``[T, r]``. Bytes in 16 bit: 2·D a token for u,
2·D for dA, 4·D for dx; the thin sides stay in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import (
    MASK_32_BITS,
    lowbias32,
    lowbias32_reference,
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    runs_in_16_bit,
    shared_memory,
    tl,
    triton,
)

MAX_LAUNCH_RANK = 256
"""Columns of u that a program holds; wider adapters are taken in slices."""

DROPOUT_TILE_ROWS = 64
"""Rows of x in a tile."""

SMALL_RANK_TILE_ROWS = 32
"""Rows of x in a tile for adapters of at most this rank; fewer, so that more programs run at once."""

DROPOUT_TILE_COLUMNS = 128
"""Columns of x in a tile."""

SUM_ROWS = 8
"""Rows of u whose shares a program adds."""


@triton.jit
def _kept(seed, row, first, width, bound, BLOCK: tl.constexpr):
    """Return the mask of ``BLOCK`` columns from ``first`` on in each row.

    Two neighbours share a 32-bit hash; each is kept if its 16 bits are at least ``bound``.
    """
    pair = first // 2 + tl.arange(0, BLOCK // 2)
    bits = lowbias32((row[:, None] * ((width + 1) // 2) + pair[None, :]).to(tl.uint32) ^ seed)
    return tl.interleave(bits << 16, bits) >= (tl.cast(bound, tl.uint32) << 16)


@triton.jit
def _down_kernel(
    # read
    x_ptr,
    a_ptr,
    # written
    shares_ptr,
    # read
    seed_ptr,
    # sizes; columns of a chunk
    rows,
    width,
    rank,
    chunk,
    # strides of rows, and the bound of the mask
    x_stride,
    a_stride,
    bound,
    # tile, and the dtype of the products
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
):
    """Write each program's share of u; programs along the second axis take a chunk of the columns."""
    seed = tl.load(seed_ptr).to(tl.uint32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    total = tl.zeros((ROWS, RANK), tl.float32)
    begin = tl.program_id(1) * chunk
    for first in range(begin, tl.minimum(width, begin + chunk), BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0.0
        )
        x = tl.where(_kept(seed, row, first, width, bound, BLOCK), x, 0.0)
        a_inside = (r < rank)[:, None] & (column < width)[None, :]
        a = tl.load(a_ptr + r[:, None] * a_stride + column[None, :], mask=a_inside, other=0.0)
        total = tl.dot(x.to(KIND), tl.trans(a.to(KIND)), total, input_precision="ieee")
    at = shares_ptr + (tl.program_id(1) * rows + row.to(tl.int64)[:, None]) * rank + r[None, :]
    tl.store(at, total, mask=(row < rows)[:, None] & (r < rank)[None, :])


@triton.jit
def _sum_kernel(
    # read
    shares_ptr,
    # written
    u_ptr,
    # sizes, and the stride of rows
    rows,
    parts,
    rank,
    columns,
    u_stride,
    # 1 / (1 − p)
    factor,
    # tile
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the shares of u in one order, and write zeros to the columns behind it."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    r = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(parts):
        total += tl.load(
            shares_ptr + (part * rows + row) * rank + r, mask=(row < rows) & (r < rank), other=0.0
        )
    tl.store(
        u_ptr + row * u_stride + r,
        (total * factor).to(u_ptr.dtype.element_ty),
        mask=(row < rows) & (r < columns),
    )


@triton.jit
def _of_a_kernel(
    # read
    g_ptr,
    x_ptr,
    # written
    shares_ptr,
    # read
    seed_ptr,
    # sizes and strides of rows
    rows,
    width,
    rank,
    g_stride,
    x_stride,
    # of the mask, and 1 / (1 − p)
    bound,
    factor,
    # tile, and the dtype of the products
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
):
    """Write each program's share of dA.

    Programs along the second axis take every n-th block of rows, n being their number; the shares
    are added afterwards in one order.
    """
    seed = tl.load(seed_ptr).to(tl.uint32)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    total = tl.zeros((RANK, BLOCK), tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0.0
        )
        x = tl.where(_kept(seed, row, tl.program_id(0) * BLOCK, width, bound, BLOCK), x, 0.0)
        g_inside = (row < rows)[:, None] & (r < rank)[None, :]
        g = tl.load(
            g_ptr + row.to(tl.int64)[:, None] * g_stride + r[None, :], mask=g_inside, other=0.0
        )
        total = tl.dot(tl.trans(g.to(KIND)), x.to(KIND), total, input_precision="ieee")
    at = shares_ptr + (tl.program_id(1) * rank + r[:, None]) * width + column[None, :]
    tl.store(at, total * factor, mask=(r < rank)[:, None] & (column < width)[None, :])


@triton.jit
def _of_x_kernel(
    # read and added to
    dx_ptr,
    # read
    g_ptr,
    a_ptr,
    seed_ptr,
    # sizes and strides of rows
    rows,
    width,
    rank,
    dx_stride,
    g_stride,
    a_stride,
    # of the mask, and 1 / (1 − p)
    bound,
    factor,
    # tile, and the dtype of the products
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
):
    seed = tl.load(seed_ptr).to(tl.uint32)
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % blocks) * BLOCK
    column = first + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    g_inside = (row < rows)[:, None] & (r < rank)[None, :]
    g = tl.load(g_ptr + row.to(tl.int64)[:, None] * g_stride + r[None, :], mask=g_inside, other=0.0)
    a_inside = (r < rank)[:, None] & (column < width)[None, :]
    a = tl.load(a_ptr + r[:, None] * a_stride + column[None, :], mask=a_inside, other=0.0)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = dx_ptr + row.to(tl.int64)[:, None] * dx_stride + column[None, :]
    dx = tl.load(at, mask=inside, other=0.0)
    through = tl.dot(g.to(KIND), a.to(KIND), input_precision="ieee") * factor
    through = tl.where(_kept(seed, row, first, width, bound, BLOCK), through, 0.0)
    tl.store(at, (dx.to(tl.float32) + through).to(dx_ptr.dtype.element_ty), mask=inside)


def _launches(x: Tensor, rank: int) -> Iterator[tuple[slice, dict[str, Any], dict[str, int], int]]:
    """Yield, for each launch, its slice of the rank and how it runs.

    That is compile-time arguments, launch options, and the number of programs that run at once.
    """
    memory = shared_memory(x.device)
    # Shared memory must hold the operands of g A, the largest of the products.
    widest = MAX_LAUNCH_RANK
    if x.is_cuda:
        while (DROPOUT_TILE_ROWS + DROPOUT_TILE_COLUMNS) * widest * x.element_size() > memory:
            widest //= 2
    for first in range(0, rank, widest):
        padded_rank = max(16, next_power_of_2(min(widest, rank - first)))
        rows = SMALL_RANK_TILE_ROWS if padded_rank <= SMALL_RANK_TILE_ROWS else DROPOUT_TILE_ROWS
        # A stage holds a tile of x and one of A; up to three, as shared memory allows.
        stage = (rows + padded_rank) * DROPOUT_TILE_COLUMNS * x.element_size()
        stages = max(1, min(3, memory // stage))
        resident = multiprocessors(x.device) * max(1, memory // (stages * stage))
        constants = {
            "ROWS": rows,
            "BLOCK": DROPOUT_TILE_COLUMNS,
            "RANK": padded_rank,
            "KIND": multiplied_in(x.dtype),
        }
        options = {"num_warps": 4, "num_stages": stages}
        yield slice(first, first + widest), constants, options, resident


def _bound(dropout: float) -> tuple[int, float]:
    """Return the 16-bit bound below which an element is dropped, and the factor 1 / (1 − p)."""
    bound = min(round(dropout * 2**16), 2**16 - 1)
    return bound, 2**16 / (2**16 - bound)


class RepeatedSeeds:
    """Seeds of masks that are drawn once, for a computation that runs several times.

    A computation has parts, such as tiles. Within ``of(part)``, ``draw_seed`` draws new seeds the
    first time, and returns the same ones, in the same order, each time after that.
    """

    def __init__(self) -> None:
        self._drawn: dict[Hashable, list[Tensor]] = {}

    @contextmanager
    def of(self, part: Hashable) -> Iterator[None]:
        """Context in which this thread draws the seeds of a part."""
        before = getattr(_now, "source", None)
        known = self._drawn.get(part)
        if known is None:
            _now.source = partial(self._draw, self._drawn.setdefault(part, []))
        else:
            remaining = iter(known)
            _now.source = lambda like: next(remaining)
        try:
            yield
        finally:
            _now.source = before

    @staticmethod
    def _draw(drawn: list[Tensor], like: Tensor) -> Tensor:
        drawn.append(_new_seed(like))
        return drawn[-1]


_now = threading.local()
"""``source``: what draws the seeds of this thread within ``RepeatedSeeds.of``."""


def _new_seed(like: Tensor) -> Tensor:
    return torch.randint(0, 2**31, (1,), device=like.device)


def draw_seed(like: Tensor) -> Tensor:
    """Draw a seed for a mask from torch's generator of the device, int64 ``[1]`` there.

    Within ``RepeatedSeeds.of`` it may be one that was drawn before.
    """
    source = getattr(_now, "source", None)
    seed: Tensor = _new_seed(like) if source is None else source(like)
    return seed


def dropped_down(x: Tensor, a: Tensor, seed: Tensor, dropout: float, out: Tensor) -> None:
    """Write ``drop(x) Aᵀ`` into the first r columns of ``out``, and zeros into its other columns.

    Rows of ``out`` may be strided.
    """
    if not runs_in_16_bit(x, a, out):
        out[:, : len(a)].copy_(dropped_reference(x, seed, dropout) @ a.t())
        out[:, len(a) :].zero_()
        return
    rows, width = x.shape
    bound, factor = _bound(dropout)
    for part, constants, launch, resident in _launches(x, len(a)):
        of_a = a[part]
        of_out = out[:, part.start :]
        rank = len(of_a)
        columns = of_out.shape[1]
        blocks = triton.cdiv(rows, constants["ROWS"])
        chunk = (
            triton.cdiv(triton.cdiv(width, DROPOUT_TILE_COLUMNS), max(1, resident // blocks))
            * DROPOUT_TILE_COLUMNS
        )
        shares = x.new_empty((triton.cdiv(width, chunk), rows, rank), dtype=torch.float32)
        _down_kernel[(blocks, len(shares))](
            x,
            of_a,
            shares,
            seed,
            rows,
            width,
            rank,
            chunk,
            x.stride(0),
            a.stride(0),
            bound,
            **constants,
            **launch,
        )
        _sum_kernel[(triton.cdiv(rows, SUM_ROWS),)](
            shares,
            of_out,
            rows,
            len(shares),
            rank,
            columns,
            out.stride(0),
            factor,
            ROWS=SUM_ROWS,
            COLUMNS=next_power_of_2(columns),
        )


def dropped_gradient_of_down(g: Tensor, x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Return dA = ``gᵀ drop(x)``, fp32 ``[r, D]``."""
    if not runs_in_16_bit(g, x):
        dropped = dropped_reference(x, seed, dropout)
        return (g.t() @ dropped).to(torch.promote_types(x.dtype, torch.float32))
    rows, width = x.shape
    blocks = triton.cdiv(width, DROPOUT_TILE_COLUMNS)
    bound, factor = _bound(dropout)
    slices = []
    for part, constants, launch, resident in _launches(x, g.shape[1]):
        of_g = g[:, part]
        rank = of_g.shape[1]
        parts = min(triton.cdiv(rows, constants["ROWS"]), max(1, resident // blocks))
        shares = x.new_empty((parts, rank, width), dtype=torch.float32)
        _of_a_kernel[(blocks, parts)](
            of_g,
            x,
            shares,
            seed,
            rows,
            width,
            rank,
            g.stride(0),
            x.stride(0),
            bound,
            factor,
            **constants,
            **launch,
        )
        slices.append(shares.sum(0))
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def add_dropped_product_(dx: Tensor, g: Tensor, a: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Add ``drop(g A)`` to ``dx`` ``[T, D]`` in place, and return ``dx``."""
    if not runs_in_16_bit(dx, g, a):
        return dx.add_(dropped_reference(g @ a, seed, dropout))
    rows, width = dx.shape
    bound, factor = _bound(dropout)
    for part, constants, launch, _ in _launches(dx, len(a)):
        of_g = g[:, part]
        of_a = a[part]
        _of_x_kernel[
            (triton.cdiv(rows, constants["ROWS"]) * triton.cdiv(width, DROPOUT_TILE_COLUMNS),)
        ](
            dx,
            of_g,
            of_a,
            seed,
            rows,
            width,
            len(of_a),
            dx.stride(0),
            g.stride(0),
            a.stride(0),
            bound,
            factor,
            **constants,
            **launch,
        )
    return dx


def dropped_reference(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Return ``drop(x)`` in plain torch, with the same mask as the kernels'."""
    rows, width = x.shape
    pairs = (width + 1) // 2
    bits = lowbias32_reference(
        (torch.arange(rows * pairs, device=x.device) & MASK_32_BITS) ^ seed
    ).view(rows, pairs, 1)
    bound, factor = _bound(dropout)
    halves = torch.cat((bits & 0xFFFF, bits >> 16), 2)
    return torch.where(halves.view(rows, 2 * pairs)[:, :width] >= bound, x * factor, 0.0)
