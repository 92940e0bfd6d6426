"""Ctrl-C and SIGTERM: finish the step, save, stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def heeding_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls ``stop`` with what happened, the second ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def heed(number: int, _frame: object) -> None:
        reason = f"stopped by {signal.Signals(number).name}"
        logger.warning("%s: finishing the step and saving; again to stop at once", reason)
        restore()
        stop(reason)

    for number in before:
        signal.signal(number, heed)
    try:
        yield
    finally:
        restore()
