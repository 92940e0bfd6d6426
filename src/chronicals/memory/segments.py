"""Segments of torch's allocator, which grow where a card has little memory to spare.

The allocator reserves memory in segments of fixed sizes, and what is free in several of them does
not make one large block. On cards of 8 to 24 GB short runs that held 85 to 88 % of them ran out of
memory, with 0.8 to 1.5 GiB reserved and not allocated (``benchmarks/results/presets-h200.json``).
Segments that grow (``expandable_segments``) have one range of addresses each, in which free memory
is one block; those of CUDA graphs' pools grow, too. Of what 1.5B held on cards of 12 and 24 GB, 9.2
and 19.2 GiB, 2 % were reserved beyond it.

A cap on the allocator (``set_per_process_memory_fraction``) asks for the room of a whole block, even
where a segment would only grow by a part of it. Free pages are given back before that is an error,
but not while a graph is captured.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)

SPARE = 0.3
"""Share of a card that a run must leave for segments to stay as they are."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator's settings, which win over ours."""


def let_segments_grow(held: int, total: int) -> bool:
    """Let the allocator's segments grow from now on, if a run leaves little of its card.

    Args:
        held: bytes that the run is expected to hold.
        total: bytes of the card; 0 without one.

    Returns:
        True if they grow; False where there is room, or the user has chosen the settings.
    """
    chosen = any(os.environ.get(name) for name in VARIABLES)
    if not torch.cuda.is_available() or not total or chosen or held <= (1 - SPARE) * total:
        return False
    settings = "expandable_segments:True"
    # the name from torch 2.12 on, and the one before
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)
    logger.info("memory: little is spare, so the allocator's segments grow (expandable_segments)")
    return True
