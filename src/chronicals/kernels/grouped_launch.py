"""Launches of grouped products: tiles that fit shared memory, and what the copy engine loads.

Both grouped products, of rows with weights and of rows with rows, compute tiles of a result by steps
of a sum; rows and columns of a tile and of a step lie in shared memory, ``stages`` steps of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import shared_memory, tl, triton

STEP_DEPTH = 64
"""Depth of a step of the sum over K: 64 elements of 16 bits are rows of 128 bytes."""


@dataclass(frozen=True)
class ProductLaunch:
    """Launch settings of a kernel of grouped products or of gradients of their weights.

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


@triton.jit
def tile_of(number, tiles, columns, GROUP: tl.constexpr):
    """Return row and column of a tile.

    Numbers go down ``GROUP`` rows of tiles, column after column, which reuses operands in L2.
    """
    group = number // (GROUP * columns)
    first = group * GROUP
    height = tl.minimum(tiles - first, GROUP)
    within = number - group * GROUP * columns
    return first + within % height, within // height


def has_boxes(on: torch.device) -> bool:
    """Return whether the card has the copy engine (TMA) of Hopper and later."""
    return on.type == "cuda" and torch.cuda.get_device_capability(on) >= (9, 0)


def staged_launch(
    rows: int, columns: int, on: torch.device, boxes: bool, most: int
) -> ProductLaunch:
    """Return the launch with as many stages as shared memory allows, up to ``most``."""
    stages = next((stages for stages in range(most, 1, -1) if fits(rows, columns, stages, on)), 1)
    return ProductLaunch(
        columns, STEP_DEPTH, 8 if rows * columns >= 128 * 256 else 4, stages, boxes=boxes, rows=rows
    )


def fits(rows: int, columns: int, stages: float, on: torch.device) -> bool:
    """Return whether shared memory holds the operands of ``stages`` steps in 16 bit."""
    room = shared_memory(on)
    # 4096 bytes are left for barriers.
    return not room or stages * (rows + columns) * STEP_DEPTH * 2 + 4096 <= room


def box_of(x: Tensor, shape: tuple[int, ...]) -> Any:
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
