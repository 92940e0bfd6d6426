"""Processes that are found again by their number and the time of their start.

The system gives a number anew when its process has ended; with the time of the start it names one
process for good.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

AFTER_STATE = 18
"""Position of the start time among the fields of ``/proc/PID/stat`` behind the state (proc(5):
fields 22 and 3)."""


def start_time(pid: int) -> str | None:
    """Return when a process was started, as the system writes it; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _start_time_without_proc(pid)
    # The name of the program, in brackets, may have blanks and brackets of its own.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[AFTER_STATE]


def _start_time_without_proc(pid: int) -> str | None:
    """Return the same on macOS."""
    listed = subprocess.run(
        ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, began = listed.stdout.strip().partition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def is_running(pid: int, began: str | None) -> bool:
    """Return whether the process that was started at this time still runs."""
    return began is not None and start_time(pid) == began


def ask_to_stop(pid: int, began: str | None) -> bool:
    """Send SIGTERM to a process, and return whether it was still running."""
    if not is_running(pid, began):
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True
