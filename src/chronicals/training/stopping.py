"""End of a run after the current step: by Ctrl-C, SIGTERM or ``ChronicalsTrainer.stop``."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chronicals.distributed import WAITING, Mesh
from chronicals.training.callbacks import Callbacks

logger = logging.getLogger(__name__)


class Stop:
    """Request to end a run, from any rank.

    Attributes:
        reason: reason for the user; None if nobody has asked.
        save: True if a checkpoint is written first.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.save = True

    def ask(self, reason: str, save: bool = True) -> None:
        """Ask the run to end; may be called from any thread and from signal handlers."""
        self.save = save
        self.reason = reason

    def is_asked(
        self, ranks: Mesh, device: torch.device, callbacks: Callbacks, failed: bool
    ) -> bool:
        """Return whether the run is to end after this step, the same on all ranks.

        All ranks must call it.

        Args:
            ranks: all ranks of the run.
            device: device of the run.
            callbacks: callbacks of the run, one of which may have raised an exception.
            failed: whether this rank could not write a checkpoint; then, too, it is to end.

        Raises:
            BaseException: what a callback raised on the first rank since the last time;
                ``TrainingError`` on the others.
        """
        ends = failed or self.reason is not None
        if ranks.count == 1:
            return ends
        own = [ends, self.reason is not None and not self.save, callbacks.error is not None]
        with WAITING.within():  # around tolist() too: with nccl only it waits for the other ranks
            asked, unsaved, raised = ranks.sum(
                torch.tensor(own, dtype=torch.float32, device=device)
            ).tolist()
        if raised:
            callbacks.raise_anywhere()
        if asked:
            reasons = enumerate(ranks.gather_values(self.reason))
            elsewhere = next(
                (f"{reason} on rank {rank}" for rank, reason in reasons if reason is not None), None
            )
            self.reason = self.reason or elsewhere
            self.save = not unsaved
        return bool(asked)  # a request since the sum counts after the next step

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Return a context in which the first Ctrl-C or SIGTERM asks the run to end.

        The second ends the process at once. Both work in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def heed(number: int, _frame: object) -> None:
            reason = f"stopped by {signal.Signals(number).name}"
            logger.warning("%s: finishing the step and saving; again to stop at once", reason)
            restore()
            self.ask(reason)

        for number in before:
            signal.signal(number, heed)
        try:
            yield
        finally:
            restore()
