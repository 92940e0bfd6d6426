"""torchrun for processes that save when they are told to end: ``python -m
chronicals.distributed.torchrun ARGUMENTS``.

torchrun passes Ctrl-C and SIGTERM on to its processes and kills those that have not ended 30
seconds later, in the middle of a long step or of a checkpoint; and it ends with a traceback of its
own.
"""

from __future__ import annotations

import sys
from typing import Any

PATIENCE = 3600
"""Seconds that processes may take to end: to finish a step, and to write a checkpoint. A second
signal ends them at once.
"""


def wait_for_processes(context: Any, interruption: type[Any]) -> None:
    """Have ``context.close`` wait ``PATIENCE`` seconds, and pass on what interrupts it.

    Args:
        context: ``torch.distributed.elastic.multiprocessing.api.PContext``.
        interruption: what torchrun raises on a signal, ``SignalException`` of the same module.
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
    """Ends as a shell tells of a signal, with 128 and its number, where one stopped the
    processes.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    wait_for_processes(PContext, SignalException)
    try:
        run.main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    main()
