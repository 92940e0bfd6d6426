"""torchrun that gives its processes time to save: ``python -m chronicals.distributed.torchrun
ARGUMENTS``.

torchrun itself passes Ctrl-C and SIGTERM on to its processes and kills them 30 seconds later, even
in a long step or while they write a checkpoint. It also ends with a traceback of its own.
"""

from __future__ import annotations

import sys
from typing import Any

PATIENCE = 3600
"""Seconds that processes may take to end after a signal: to finish a step and to write a
checkpoint.

A second signal ends them at once.
"""


def wait_for_processes(context: Any, interruption: type[Any]) -> None:
    """Make ``context.close`` wait ``PATIENCE`` seconds, and pass further signals on to the
    processes.

    Args:
        context: the class ``torch.distributed.elastic.multiprocessing.api.PContext``.
        interruption: exception that torchrun raises on a signal, ``SignalException`` of that
            module.
    """
    close = context.close

    def patiently(self: Any, death_sig: Any = None, timeout: int = 0) -> None:
        while True:
            try:
                return close(self, death_sig, max(timeout, PATIENCE))
            except interruption as again:
                death_sig = again.sigval

    context.close = patiently


def main() -> None:
    """Run torchrun; after a signal, exit with 128 plus its number, as shells do."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    wait_for_processes(PContext, SignalException)
    try:
        run.main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    main()
