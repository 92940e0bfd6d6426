"""Policies for activations."""

from chronicals.memory.offload import ActivationOffload
from chronicals.memory.recompute import (
    CHEAP,
    LAYERS,
    NOTHING,
    Estimate,
    draws_numbers,
    enable_gradient_checkpointing,
    estimate,
    runs_again,
)
from chronicals.memory.tiling import makes_tiles, tiled

__all__ = [
    "CHEAP",
    "LAYERS",
    "NOTHING",
    "ActivationOffload",
    "Estimate",
    "draws_numbers",
    "enable_gradient_checkpointing",
    "estimate",
    "makes_tiles",
    "runs_again",
    "tiled",
]
