"""Logging to stderr for users who configured none. A configuration of the user's is not changed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACKAGE_LOGGER = logging.getLogger("chronicals")


class Stderr(logging.StreamHandler):
    """Handler that writes to the current ``sys.stderr``, which progress bars, notebooks and tests
    replace.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr


@contextmanager
def heard(first: bool = True) -> Iterator[None]:
    """Context manager in which our logger writes to stderr, unless a handler is configured.

    Args:
        first: True for the first rank; other ranks write only warnings.
    """
    if PACKAGE_LOGGER.hasHandlers():
        yield
        return
    handler = Stderr()
    level = PACKAGE_LOGGER.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.NOTSET if first else logging.WARNING)
    PACKAGE_LOGGER.addHandler(handler)
    if level == logging.NOTSET:
        PACKAGE_LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        PACKAGE_LOGGER.setLevel(level)
        PACKAGE_LOGGER.removeHandler(handler)


def is_heard(logger: logging.Logger) -> bool:
    """Return whether messages of ``logger`` at level INFO are shown anywhere."""
    return logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
