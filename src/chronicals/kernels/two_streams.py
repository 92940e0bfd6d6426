"""Run two calls on two streams of one card.

A product whose number of tiles is no multiple of the multiprocessors leaves some of them idle in
its last wave. A second product on a stream of lower priority fills these and takes no others. On
streams of equal priority the two would take turns, which gains nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

HIGH_PRIORITY = -1
"""CUDA priority of a stream beside which another may work. CUDA's default, the lowest, is 0."""


def at_once(first: Callable[[], None], beside: Callable[[], None], device: torch.device) -> None:
    """Run both calls; work enqueued later on the current stream sees both finished.

    They overlap if the current stream has ``HIGH_PRIORITY`` or a higher one. Otherwise, and on the
    CPU, they run one after the other, with the same results.

    Args:
        first: runs on the current stream.
        beside: runs on a stream of the lowest priority, on the multiprocessors that ``first``
            leaves idle. It must not write what ``first`` reads or writes, nor read what it writes.
        device: the device of both.
    """
    current = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if current is None or current.priority > HIGH_PRIORITY:
        first()
        beside()
        return
    other = _lowest_stream(device)
    other.wait_stream(current)
    try:
        with torch.cuda.stream(other):
            beside()
        first()
    finally:
        current.wait_stream(other)


@functools.cache
def _lowest_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
