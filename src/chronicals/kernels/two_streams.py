"""Two calls at the same time on one card.

A product whose tiles are fewer than the multiprocessors, or a little more than a whole number of
times as many, leaves some idle. Another one beside it fills them, and only them where its stream
comes second; two of one rank take turns, which gains nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

HIGH_PRIORITY = -1
"""Priority of a stream whose work another one may stand beside; that of all streams, unless said
otherwise, is 0, the last.
"""


def at_once(first: Callable[[], None], beside: Callable[[], None], device: torch.device) -> None:
    """Both calls; whatever follows on the current stream finds both done.

    At the same time where the current stream goes before others, else one after the other, with the
    same results.

    Args:
        first: what takes the multiprocessors it wants.
        beside: what takes the rest. It must not write what the other reads or writes, nor read what
            that writes.
    """
    if (
        device.type != "cuda"
        or (current := torch.cuda.current_stream(device)).priority > HIGH_PRIORITY
    ):
        first()
        beside()
        return
    other = _last(device)
    other.wait_stream(current)
    try:
        with torch.cuda.stream(other):
            beside()
        first()
    finally:
        current.wait_stream(other)


@functools.cache
def _last(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
