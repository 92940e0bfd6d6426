"""Log lines reach a user who configured no logging; what a user configured stays as it is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OURS = logging.getLogger("chronicals")


class Stderr(logging.StreamHandler):
    """Writes to whatever stderr is at that time: a progress bar, a notebook and a test put their
    own there.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr


@contextmanager
def heard(first: bool = True) -> Iterator[None]:
    """Return a context in which our logger writes to stderr if no logger above it has a handler.

    Args:
        first: whether this is the first rank; others write warnings alone.
    """
    if OURS.hasHandlers():
        yield
        return
    handler = Stderr()
    level = OURS.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.NOTSET if first else logging.WARNING)
    OURS.addHandler(handler)
    if level == logging.NOTSET:
        OURS.setLevel(logging.INFO)
    try:
        yield
    finally:
        OURS.setLevel(level)
        OURS.removeHandler(handler)


def is_heard(logger: logging.Logger) -> bool:
    """Return whether messages of ``logger`` at level INFO are shown anywhere."""
    return logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
