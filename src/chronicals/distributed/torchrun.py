"""torchrun that gives its processes time to save.

Usage: ``python -m chronicals.distributed.torchrun ARGUMENTS``, with torchrun's own arguments.

torchrun itself passes Ctrl-C and SIGTERM on to its processes and kills them 30 seconds later, even
in a long step or while they write a checkpoint. It also ends with a traceback of its own.
"""

from __future__ import annotations

import sys
from typing import Any

TIME_TO_END = 3600
"""Seconds that processes may take to end after a signal: to finish a step and to write a
checkpoint.

A second signal ends them at once.
"""


def wait_for_processes(context: Any, interruption: type[Any]) -> None:
    """Make ``context.close`` wait ``TIME_TO_END`` seconds, and pass further signals on.

    Args:
        context: the class ``torch.distributed.elastic.multiprocessing.api.PContext``.
        interruption: exception that torchrun raises on a signal, ``SignalException`` of that
            module.
    """
    close = context.close

    def patiently(self: Any, death_sig: Any = None, timeout: int = 0) -> None:
        while True:
            try:
                return close(self, death_sig, max(timeout, TIME_TO_END))
            except interruption as again:
                death_sig = again.sigval

    context.close = patiently


def run_torchrun() -> None:
    """Run torchrun; after a signal, exit with 128 plus its number, as shells do."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    wait_for_processes(PContext, SignalException)
    try:
        run.main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    run_torchrun()
