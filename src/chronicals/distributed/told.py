"""That something which the first rank does is over, told to the others over the store, by no
collective.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import torch.distributed as dist

from chronicals.distributed.mesh import awaited

_numbers = itertools.count()
"""Of what is told, the same in all processes, which make them in the same order."""


class Told:
    """Made by all ranks, in their main threads; its methods may be called in others."""

    def __init__(self) -> None:
        self._key = f"chronicals/told/{next(_numbers)}"
        self._store = dist.distributed_c10d._get_default_store()

    def after(self, work: Callable[[], None]) -> None:
        """On the first rank: do it, and say that it is over, however it ended."""
        try:
            work()
        finally:
            self._store.set(self._key, "yes")

    def wait(self) -> None:
        """On another: until the first has said so, or is gone, and the store with it."""
        with contextlib.suppress(RuntimeError):
            awaited(self._store, self._key)
