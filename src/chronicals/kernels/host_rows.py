"""Rows of a table in pinned host memory, gathered by the card itself.

    y[t] = W[id_t]        W [V, D] in host memory,  id [...] and y [..., D] on the card

The card reads pinned memory over the bus at the address that the driver maps for it (unified
virtual addressing), so that ids need not come to the host, which waits for nothing, and a CUDA
graph can capture the launch. The values are copied, not computed with: y is bit-equal to the rows.
Without a gradient. Bytes that must move: D elements a token over the bus, and D written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.launch import (
    Tile,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
)

MAX_BLOCK = 4096
"""Elements of a row that one program copies: 8 KiB in 16 bits."""


def _tile(width: int) -> Tile:
    # 16 elements a thread: two 16-byte loads of a 16-bit row. Not measured yet.
    block = min(MAX_BLOCK, next_power_of_2(width))
    return Tile(1, block, warps=max(1, min(8, block // 512)))


@triton.jit
def _host_rows_kernel(id_ptr, w_ptr, y_ptr, missing, rows, width, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(id_ptr + t).to(tl.int64)
    # A row that the table does not have is ``missing``, and nothing beyond the table is read.
    there = tl.where((row >= 0) & (row < rows), width, 0)
    w = tl.load(w_ptr + row * width + columns, mask=columns < there, other=missing)
    tl.store(y_ptr + t * width + columns, w, mask=columns < width)


@operator("chronicals::host_rows")
def _gathered(ids: Tensor, table: Tensor) -> Tensor:
    rows, width = table.shape
    y = torch.empty((*ids.shape, width), dtype=table.dtype, device=ids.device)
    tile = _tile(width)
    if y.numel():
        grid = (ids.numel(), triton.cdiv(width, tile.block))
        _host_rows_kernel[grid](
            ids, table, y, float("nan"), rows, width, tile.block, num_warps=tile.warps
        )
    return y


@torch.library.register_fake(_gathered)
def _(ids: Tensor, table: Tensor) -> Tensor:
    return torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=ids.device)


def host_rows(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows ``ids`` of a table in host memory, ``[..., D]`` on the device of ``ids``.

    Args:
        ids: int64 or int32 ``[...]``; on a card each is of a row of the table, or its row is NaN.
        table: ``[V, D]`` with dense rows, in host memory; pinned where ``ids`` are on a card.

    Raises:
        ValueError: ``ids`` are on a card and the table is not pinned.
    """
    if ids.is_cuda and not table.is_pinned():
        raise ValueError("host_rows: the table is not in pinned memory, which a card reads")
    like = torch.empty(0, dtype=table.dtype, device=ids.device)
    if runs_triton(like) and table.is_contiguous():
        return _gathered(ids.contiguous(), table)
    return host_rows_reference(ids, table)


def host_rows_reference(ids: Tensor, table: Tensor) -> Tensor:
    """Compute ``host_rows`` in plain torch: the host gathers the rows, and waits for the ids."""
    return F.embedding(ids.to(table.device), table).to(ids.device)
