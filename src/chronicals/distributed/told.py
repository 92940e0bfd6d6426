"""A signal over the store, without collectives, that work of rank 0 has ended."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import torch.distributed as dist

from chronicals.distributed.mesh import awaited

_numbers = itertools.count()
"""Counter for the keys; equal on all ranks, which create signals in the same order."""


class Told:
    """Signal from rank 0 to the others.

    All ranks must create it, in their main threads; its methods may be called from other threads.
    """

    def __init__(self) -> None:
        self._key = f"chronicals/told/{next(_numbers)}"
        self._store = dist.distributed_c10d._get_default_store()

    def after(self, work: Callable[[], None]) -> None:
        """Run ``work`` on rank 0 and then signal, even if it raised."""
        try:
            work()
        finally:
            self._store.set(self._key, "yes")

    def wait(self) -> None:
        """Wait on another rank for the signal, or until the store is gone together with rank 0."""
        with contextlib.suppress(RuntimeError):
            awaited(self._store, self._key)
