"""Computes a row-wise function in tiles, each recomputed in the backward pass.

This is sequence tiling (Bekman et al., 2025). The inner activations of an MLP are several times as
wide as the model; with tiles they exist for one tile at a time.
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
"""Rows of a tile: enough for matrix products to run at full speed."""


def makes_tiles(rows: int) -> bool:
    """Return True if ``rows`` rows are more than one tile."""
    return rows > TILE


def tiled(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    draws: bool = False,
    tells: bool = False,
    tile: int | None = None,
) -> Tensor:
    """Compute ``function(x)``, ``[T, ...]``, in tiles of rows.

    Args:
        function: maps ``[n, D]`` to ``[n, ...]``; each output row depends on its input row only.
        x: ``[T, D]``.
        draws: the function draws random numbers, and its recomputation must draw the same ones.
        tells: ``runs_again`` is set inside the function while it is recomputed; torch.compile
            cannot trace that.
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
