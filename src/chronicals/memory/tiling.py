"""A function of rows, so many at a time, each made again in the backward pass (Bekman et al., 2025, sequence tiling).

What an MLP makes on the way is several times as wide as the model; of a tile, it exists for that tile alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chronicals.memory.recompute import first_and_again

TILE = 4096
"""Rows of a tile: enough for products to run at their rate."""


def makes_tiles(rows: int) -> bool:
    """Whether so many rows are more than a tile."""
    return rows > TILE


def tiled(
    function: Callable[[Tensor], Tensor], x: Tensor, draws: bool = False, tells: bool = False, tile: int | None = None
) -> Tensor:
    """``function(x)``, ``[T, ...]``, for a function each of whose rows is made of one row of x.

    Args:
        x: ``[T, D]``.
        draws: the function draws random numbers, which must be the same when it is run again.
        tells: within the function ``runs_again`` speaks of the tile; a compiler does not follow that.
        tile: most rows at a time; ``TILE`` by default.
    """
    tile = tile or TILE
    if len(x) <= tile:
        with first_and_again()[0] if tells else nullcontext():
            return function(x)
    parts = x.split(tile)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts])
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if tells:
        options["context_fn"] = first_and_again
    return torch.cat([checkpoint(function, part, **options) for part in parts])
