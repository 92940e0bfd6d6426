"""Advice in the error of a run whose GPU memory is exhausted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chronicals.config import ChronicalsConfig
from chronicals.policies.memory_check import ways_to_take_less
from chronicals.training.errors import TrainingError


@contextmanager
def saying_what_helps(
    config: ChronicalsConfig, device: torch.device, ranks: int = 1
) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into TrainingError.

    The message says how much memory there is, what uses it, and which settings need less.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        ways = "; or ".join(ways_to_take_less(config, ranks))
        raise TrainingError(
            f"out of memory on {device}{_held(device)}. Less is taken by {ways}"
        ) from error


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, whole = torch.cuda.mem_get_info(device)
    ours = torch.cuda.max_memory_allocated(device)
    others = whole - free - torch.cuda.memory_reserved(device)
    return " ({:.1f} GiB; this run held up to {:.1f}, the driver and others hold {:.1f})".format(
        *(size / 2**30 for size in (whole, ours, others))
    )
