"""Warnings of libraries that a user cannot act on.

They are hidden while a command of ours runs, and written to the run's folder.

An import of this module changes nothing: only ``main`` collects, in its own process, and restores
everything.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "bitsandbytes", "triton")
"""Packages whose warnings are collected."""

LOG_FILE = "log.txt"
"""File in a run's folder with the warnings."""

ACTIONABLE = re.compile(
    r"CUDA initialization|driver|out of memory|newly initialized|HF_TOKEN|pip install",
    re.IGNORECASE,
)
"""Words of warnings that the reader can act on; these stay visible."""

FROM_CPP = "(Triggered internally at"
"""End of a warning of torch's C++ code, for which Python names the caller's line."""


@dataclass
class Collected:
    """Warnings of libraries, in order.

    Attributes:
        folder: of the run, if the command has one.
    """

    lines: list[str] = field(default_factory=list)
    libraries: set[str] = field(default_factory=set)
    folder: Path | None = None

    def add(self, library: str, text: str) -> None:
        """Collect a warning of a library, with the time."""
        now = datetime.now().isoformat(timespec="seconds")
        self.lines.append(f"{now} {library}: {text.strip()}\n")
        self.libraries.add(library)

    def close(self) -> None:
        """Write them to the run's folder and say so; without a folder, log them for debugging."""
        if not self.lines:
            return
        if self.folder is None or not self.folder.is_dir():
            for line in self.lines:
                logger.debug("%s", line.strip())
            return
        file = self.folder / LOG_FILE
        try:
            with file.open("a", encoding="utf-8") as out:
                out.writelines(self.lines)
        except OSError as error:  # must not hide the error that ended the command
            logger.warning(
                "%s: cannot be written (%s); lost: %d warnings of libraries",
                file,
                error,
                len(self.lines),
            )
            return
        count = len(self.lines)
        named = ", ".join(name for name in LIBRARIES if name in self.libraries)
        logger.info(
            "%d warning%s of %s, nothing to act on: %s",
            count,
            "" if count == 1 else "s",
            named,
            file,
        )


_current: Collected | None = None
"""Warnings of the command that runs in this process."""


def keep_in(folder: Path) -> None:
    """Write the warnings that this process collects to the run's folder when the command ends.

    It has no effect if this process collects none.
    """
    if _current is not None:
        _current.folder = folder


@contextmanager
def collected() -> Iterator[Collected]:
    """Collect warnings of ``LIBRARIES``, from Python and from logs, instead of showing them.

    It lasts as long as the context.
    """
    global _current
    collecting = Collected()
    before = _current
    show = warnings.showwarning
    call_handlers = logging.Logger.callHandlers

    def show_or_collect(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        library = _issuer(str(message))
        if library is None or ACTIONABLE.search(str(message)):
            show(message, category, filename, lineno, file, line)
        else:
            collecting.add(library, f"{filename}:{lineno}: {category.__name__}: {message}")

    def handle_or_collect(self: logging.Logger, record: logging.LogRecord) -> None:
        library = record.name.partition(".")[0]
        quiet = record.levelno == logging.WARNING and library in LIBRARIES
        if quiet and not ACTIONABLE.search(record.getMessage()):
            collecting.add(library, f"{record.name}: {record.getMessage()}")
        else:
            call_handlers(self, record)

    # Handlers come and go as libraries are imported; the class sees the records of all loggers.
    logger_class: Any = logging.Logger
    warnings.showwarning = show_or_collect
    logger_class.callHandlers = handle_or_collect
    _current = collecting
    try:
        yield collecting
    finally:
        warnings.showwarning = show
        logger_class.callHandlers = call_handlers
        _current = before
        collecting.close()


def _issuer(text: str) -> str | None:
    """Return the library that issued the warning shown now; None if it is none of ``LIBRARIES``.

    By ``stacklevel`` the line that Python names may be the caller's. The issuer is the first frame
    outside of ``warnings``.
    """
    if FROM_CPP in text:
        return "torch"
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "warnings"):
        frame = frame.f_back  # type: ignore[assignment]
    package = "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package if package in LIBRARIES else None
