"""Messages that a process logs once, although their reason occurs again and again."""

from __future__ import annotations

from collections.abc import Callable

LOGGED: set[str] = set()
"""Messages that were logged already; empty it to have them logged again."""


def log_once(log: Callable[[str], None], message: str) -> None:
    """Log a message the first time that it is given.

    Args:
        log: method of a logger, as ``logger.warning``.
        message: what to log.
    """
    if message not in LOGGED:
        LOGGED.add(message)
        log(message)
