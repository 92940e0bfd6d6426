"""Compilation in a separate process while the main process imports libraries and loads a model.

It fills a cache on disk. ``python -m chronicals.precompilation MARK MODULE [ARGUMENT ...]`` calls
the function ``main`` of one of our modules, and then writes an empty file, the mark, which shows
later runs that the work is done. Code that needs the cache can ask whether the process is still
running. This module is imported first of all, so it imports neither torch nor numba.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from chronicals.bound_process import BoundProcess

MARKS_FOLDER = Path.home() / ".cache" / "chronicals" / "beforehand"
"""Folder of the marks. If a cache was deleted and its mark was not, the run itself compiles."""

LONGEST_WAIT = 60.0
"""Seconds after which a process counts as not running."""

_processes: dict[str, tuple[BoundProcess, float]] = {}
"""Processes by module, with the time of their start."""


def start_precompilation(module: str, arguments: Sequence[str], facts: Sequence[str]) -> None:
    """Start the process of a module, unless an earlier run did its work.

    Only the first rank of a machine starts it.

    Args:
        module: name of a module with a function ``main``.
        arguments: arguments of its ``main``.
        facts: whatever else decides if the cache can be used: versions, paths.
    """
    if module in _processes or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    key = "\0".join([module, *arguments, *facts, sys.version])
    mark = MARKS_FOLDER / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        MARKS_FOLDER.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # without a mark it would compile in every run
    if not mark.exists():
        command = [sys.executable, "-m", __name__, str(mark), module, *arguments]
        process = BoundProcess(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _processes[module] = (process, time.monotonic())


def running(module: str) -> bool:
    """Return whether the process of a module is running and is worth waiting for."""
    if module not in _processes:
        return False
    process, began = _processes[module]
    return process.poll() is None and time.monotonic() - began < LONGEST_WAIT


if __name__ == "__main__":
    import_module(sys.argv[2]).main(*sys.argv[3:])
    Path(sys.argv[1]).touch()
