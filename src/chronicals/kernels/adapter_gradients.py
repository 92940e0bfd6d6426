"""Both gradients at the wide end of adapters on one merged product, with dy read once.

    g = dy (s·B)        dB_i = f_i · dy_iᵀ u_i        for y_i += s_i · u_i B_iᵀ; s·B is block-diagonal

``dy`` is ``[T, N]``, u and g ``[T, R]``, s·B ``[N, R]``, R at least the sum of the ranks. A program
goes down some rows of a strip of columns. It sums dB of its columns in registers and writes the
strip's share of g. A second launch adds the shares in one order, so results are reproducible. Bytes
in 16 bit: 2·N a token, and 8·r·N / (columns of a strip) for shares written and read, where r is the
largest rank rounded up to a power of two, at least 16. Two separate products would read 4·N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import (
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    runs_in_16_bit,
    shared_memory,
    tl,
    triton,
)
from chronicals.kernels.products import product, product_into

MAX_FUSED_LAYERS = 3
"""Layers that one launch takes (queries, keys and values); more go by separate products."""

MAX_FUSED_RANK = 32
"""The largest rank of a launch. The shares of wider adapters would be half the size of dy; they go
by separate products.
"""

GRADIENT_TILE_ROWS = 64
"""Rows of dy in a tile, the fewest that a warpgroup of tensor cores multiplies."""

SUM_BLOCK = 1024
"""Elements that a program of the second launch sums."""


@triton.jit
def _passing_kernel(
    # read
    dy_ptr,
    up_ptr,
    u_ptr,
    # written: each strip's share of g, each chunk's share of dB
    of_g_ptr,
    of_up_ptr,
    # rows in all, and of a chunk
    rows,
    chunk,
    # strides of rows
    dy_stride,
    up_stride,
    u_stride,
    # outputs and rank of each layer, strips of the first two
    size0,
    size1,
    size2,
    rank0,
    rank1,
    rank2,
    strips0,
    strips1,
    # columns of a strip, rank (padded), rows of a tile, dtype of the products
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Compute a strip's share of g and a chunk's share of dB.

    Programs along the first axis are strips of columns, layer after layer; along the second axis
    chunks of rows.
    """
    strip = tl.program_id(0)
    part = tl.program_id(1)
    inner = strip
    size = size0
    rank = rank0
    above = 0
    beside = 0
    if strip >= strips0:
        inner = strip - strips0
        size = size1
        rank = rank1
        above = size0
        beside = rank0
    if strip >= strips0 + strips1:
        inner = strip - strips0 - strips1
        size = size2
        rank = rank2
        above = size0 + size1
        beside = rank0 + rank1
    at = inner * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    column = above + at
    wide = at < size
    thin = (r < rank)[None, :]
    up_at = up_ptr + column.to(tl.int64)[:, None] * up_stride + beside + r[None, :]
    up = tl.load(up_at, mask=wide[:, None] & thin, other=0.0).to(KIND)
    of_up = tl.zeros((COLUMNS, RANK), tl.float32)
    for first in range(part * chunk, tl.minimum(rows, (part + 1) * chunk), ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        dy = tl.load(
            dy_ptr + row * dy_stride + column[None, :], mask=(row < rows) & wide[None, :], other=0.0
        ).to(KIND)
        u = tl.load(
            u_ptr + row * u_stride + beside + r[None, :], mask=(row < rows) & thin, other=0.0
        ).to(KIND)
        of_up = tl.dot(tl.trans(dy), u, of_up, input_precision="ieee")
        g = tl.dot(dy, up, input_precision="ieee")
        tl.store(of_g_ptr + (strip * rows + row) * RANK + r[None, :], g, mask=row < rows)
    place = (part * tl.num_programs(0) + strip).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(of_up_ptr + place[:, None] * RANK + r[None, :], of_up)


@triton.jit
def _summing_kernel(
    # read: the shares of the first kernel
    of_g_ptr,
    of_up_ptr,
    # written
    g_ptr,
    up_ptr,
    # rows, chunks, and programs that sum g
    rows,
    parts,
    of_rows,
    # rows and columns of g
    g_stride,
    width,
    # outputs, rank, factor and strips of each layer
    size0,
    size1,
    size2,
    rank0,
    rank1,
    rank2,
    factor0,
    factor1,
    factor2,
    strips0,
    strips1,
    strips2,
    # tile of the first kernel, elements of a program, free columns of g
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Add the shares of g and of dB.

    Programs along the second axis are layers. Along the first axis ``of_rows`` programs add g, the
    remaining ones dB.
    """
    layer = tl.program_id(1)
    program = tl.program_id(0)
    begin = 0
    strips = strips0
    size = size0
    rank = rank0
    factor = factor0
    beside = 0
    before = 0
    if layer == 1:
        begin = strips0
        strips = strips1
        size = size1
        rank = rank1
        factor = factor1
        beside = rank0
        before = size0 * rank0
    if layer == 2:
        begin = strips0 + strips1
        strips = strips2
        size = size2
        rank = rank2
        factor = factor2
        beside = rank0 + rank1
        before = size0 * rank0 + size1 * rank1
    total = tl.zeros((BLOCK,), tl.float32)
    if program < of_rows:
        at = program * BLOCK + tl.arange(0, BLOCK)
        row = at // RANK
        r = at % RANK
        inside = (row < rows) & (r < rank)
        for strip in range(strips):
            share = ((begin + strip) * rows + row.to(tl.int64)) * RANK + r
            total += tl.load(of_g_ptr + share, mask=inside, other=0.0)
        tl.store(
            g_ptr + row.to(tl.int64) * g_stride + beside + r,
            total.to(g_ptr.dtype.element_ty),
            mask=inside,
        )
        if EMPTY > 0 and layer == 0:
            down = program * (BLOCK // RANK) + tl.arange(0, BLOCK // RANK)[:, None]
            across = rank0 + rank1 + rank2 + tl.arange(0, EMPTY)[None, :]
            nothing = tl.zeros((BLOCK // RANK, EMPTY), g_ptr.dtype.element_ty)
            tl.store(
                g_ptr + down.to(tl.int64) * g_stride + across,
                nothing,
                mask=(down < rows) & (across < width),
            )
    else:
        at = (program - of_rows) * BLOCK + tl.arange(0, BLOCK)
        row = at // RANK
        r = at % RANK
        inside = (row < size) & (r < rank)
        for part in range(parts):
            first = (part * (strips0 + strips1 + strips2) + begin) * COLUMNS + row
            total += tl.load(of_up_ptr + first.to(tl.int64) * RANK + r, mask=inside, other=0.0)
        tl.store(
            up_ptr + before + row * rank + r,
            (total * factor).to(up_ptr.dtype.element_ty),
            mask=inside,
        )


def _constants(dy: Tensor, rank: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the compile-time arguments of the first kernel and its launch options."""
    size = dy.element_size()
    padded_rank = max(16, next_power_of_2(rank))
    columns = 512 if padded_rank == 16 else 256
    # Columns of a strip are halved until shared memory holds two tiles of dy and u besides the
    # strip's s·B, so that one is loaded while another is multiplied.
    while True:
        room = shared_memory(dy.device) - columns * padded_rank * size
        tiles = room // (GRADIENT_TILE_ROWS * (columns + padded_rank) * size)
        if tiles >= 2 or not dy.is_cuda:
            break
        columns //= 2
    constants = {
        "COLUMNS": columns,
        "RANK": padded_rank,
        "ROWS": GRADIENT_TILE_ROWS,
        "KIND": multiplied_in(dy.dtype),
    }
    return constants, {"num_warps": 8, "num_stages": max(1, min(4, tiles))}


def adapter_gradients(
    dy: Tensor,
    up: Tensor,
    u: Tensor,
    g: Tensor,
    sizes: Sequence[int],
    ranks: Sequence[int],
    factors: Sequence[float],
    kind: torch.dtype,
) -> list[Tensor]:
    """Write g and return dB of each layer, ``[size, rank]`` of dtype ``kind``.

    Args:
        dy: ``[T, N]``.
        up: s·B of all layers as a block diagonal, zeros elsewhere, ``[N, R]``.
        u: x Aᵀ of all layers' adapters, ``[T, R]``; rows may be strided.
        g: written, ``[T, R]``; rows may be strided.
        sizes: outputs of each layer.
        ranks: rank of each layer's adapter; 0 means no adapter.
        factors: f of each layer's dB.
        kind: dtype of the results.
    """
    if (
        len(sizes) > MAX_FUSED_LAYERS
        or not 0 < max(ranks) <= MAX_FUSED_RANK
        or not runs_in_16_bit(dy, up, u, g)
    ):
        return _by_products(dy, up, u, g, sizes, ranks, factors, kind)
    constants, launch = _constants(dy, max(ranks))
    columns = constants["COLUMNS"]
    rank = constants["RANK"]
    none = [0] * (MAX_FUSED_LAYERS - len(sizes))
    strips = [triton.cdiv(size, columns) if r else 0 for size, r in zip(sizes, ranks)]
    count = sum(strips)
    empty = g.shape[1] - sum(ranks)
    rows = len(dy)
    tiles = triton.cdiv(len(dy), GRADIENT_TILE_ROWS)
    parts = max(1, min(tiles, multiprocessors(dy.device) // count))
    chunk = triton.cdiv(tiles, parts) * GRADIENT_TILE_ROWS
    of_g = dy.new_empty((count, rows, rank), dtype=torch.float32)
    of_up = dy.new_empty((parts, count * columns, rank), dtype=torch.float32)
    d_up = dy.new_empty(sum(size * r for size, r in zip(sizes, ranks)), dtype=kind)
    _passing_kernel[(count, parts)](
        dy,
        up,
        u,
        of_g,
        of_up,
        rows,
        chunk,
        dy.stride(0),
        up.stride(0),
        u.stride(0),
        *sizes,
        *none,
        *ranks,
        *none,
        *[*strips, *none][:2],
        **constants,
        **launch,
    )
    of_rows = triton.cdiv(rows * rank, SUM_BLOCK)
    _summing_kernel[(of_rows + triton.cdiv(max(sizes) * rank, SUM_BLOCK), len(sizes))](
        of_g,
        of_up,
        g,
        d_up,
        rows,
        parts,
        of_rows,
        g.stride(0),
        g.shape[1],
        *sizes,
        *none,
        *ranks,
        *none,
        *factors,
        *map(float, none),
        *strips,
        *none,
        columns,
        rank,
        SUM_BLOCK,
        next_power_of_2(empty) if empty else 0,
    )
    blocks = d_up.split([size * r for size, r in zip(sizes, ranks)])
    return [block.view(size, r) for block, size, r in zip(blocks, sizes, ranks)]


def _by_products(
    dy: Tensor,
    up: Tensor,
    u: Tensor,
    g: Tensor,
    sizes: Sequence[int],
    ranks: Sequence[int],
    factors: Sequence[float],
    kind: torch.dtype,
) -> list[Tensor]:
    """Compute ``adapter_gradients`` by separate products; also the reference."""
    product_into(g, dy, up)
    rows = dy.split(list(sizes), 1)
    columns = u[:, : sum(ranks)].split(list(ranks), 1)
    return [
        product(of_layer.t(), part, kind, factor) if rank else dy.new_empty((size, 0), dtype=kind)
        for of_layer, part, factor, size, rank in zip(rows, columns, factors, sizes, ranks)
    ]
