"""A function of rows, so many at a time, each made again in the backward pass (Bekman et al., 2025, sequence tiling).

What an MLP makes on the way is several times as wide as the model; of a tile, it exists for that tile alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chronicals.memory.recompute import first_and_again

TILE = 4096
"""Rows of a tile: enough for products to run at their rate."""


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, draws: bool = False, tile: int | None = None) -> Tensor:
    """``function(x)``, ``[T, ...]``, for a function each of whose rows is made of one row of x; within it ``runs_again``
    speaks of the tile.

    Args:
        x: ``[T, D]``.
        draws: the function draws random numbers, which must be the same when it is run again.
        tile: most rows at a time; ``TILE`` by default.
    """
    tile, (first, _) = tile or TILE, first_and_again()
    if len(x) <= tile:
        with first:
            return function(x)
    parts = x.split(tile)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts])
    again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=draws, context_fn=first_and_again)
    return torch.cat([again(part) for part in parts])
