"""What still runs of a process group, from /proc."""

import time
from pathlib import Path


def members(group: int) -> list[int]:
    """Processes of the group that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            found.append(int(folder.name))
    return found


def wait_until(true, seconds):
    """What ``true()`` says, at the latest after so many seconds."""
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()
