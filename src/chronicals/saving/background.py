"""A thread that does one piece of work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Background:
    """Runs at most one piece of work at a time. The process may end without waiting for it.

    Args:
        device: becomes the thread's current GPU, which would be the first one otherwise.

    Attributes:
        error: raised by the last piece of work; ``wait`` raises it again.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start a piece of work; the one before must have been waited for."""
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
        """True while a piece of work is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until no work is running.

        Raises:
            BaseException: raised by the work.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self.error
        self.error = None
        if error is not None:
            raise error
