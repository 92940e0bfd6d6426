"""Work that fills a cache on disk, by a process of its own, beside imports and the loading of a
model.

A module of ours with a function ``main`` does the work: ``python -m chronicals.beforehand MARK
MODULE [ARGUMENT ...]`` calls it and then leaves an empty file, the mark, by which later runs know
that it was done. Whoever needs what the cache will hold can ask whether the process is still at
work. This module is imported first of all, so it imports neither torch nor numba.
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

from chronicals.lifeline import BoundProcess

DONE = Path.home() / ".cache" / "chronicals" / "beforehand"
"""Where the marks are. Without them a cache that was deleted is filled by the run itself, as it
would be without all this.
"""

PATIENCE = 60.0
"""Seconds after which nobody waits for a process any longer."""

_processes: dict[str, tuple[BoundProcess, float]] = {}
"""By module, with when it was started."""


def start(module: str, arguments: Sequence[str], facts: Sequence[str]) -> None:
    """Start the process of a module, unless it was done before; of the processes of a machine the
    first one does.

    Args:
        arguments: of its ``main``.
        facts: whatever else decides whether what the cache holds can be used: versions, places.
    """
    if module in _processes or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    mark = (
        DONE
        / hashlib.sha256("\0".join([module, *arguments, *facts, sys.version]).encode()).hexdigest()[
            :16
        ]
    )
    try:
        DONE.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written: it would be done every time
    if not mark.exists():
        nothing = subprocess.DEVNULL
        command = [sys.executable, "-m", __name__, str(mark), module, *arguments]
        _processes[module] = (
            BoundProcess(command, stdin=nothing, stdout=nothing, stderr=nothing),
            time.monotonic(),
        )


def running(module: str) -> bool:
    """Whether its process is still at work, and it is worth while to wait for it."""
    if module not in _processes:
        return False
    process, began = _processes[module]
    return process.poll() is None and time.monotonic() - began < PATIENCE


if __name__ == "__main__":
    import_module(sys.argv[2]).main(*sys.argv[3:])
    Path(sys.argv[1]).touch()
