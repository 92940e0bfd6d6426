"""A thread that does one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Background:
    """At most one piece of work is under way. The process may end without waiting for it.

    Args:
        device: a card is the thread's current one; else each would have the first.

    Attributes:
        error: what the last piece of work raised, until ``wait`` raises it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin it; what was begun before must have been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                if self.device is not None and self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                work()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether it is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            BaseException: what the work raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self.error
        self.error = None
        if error is not None:
            raise error
