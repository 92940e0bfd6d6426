"""Callbacks of a run: the events that they are told of, and the file of metrics."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh, refusing_collectives
from chronicals.standard_json import to_json
from chronicals.training.errors import Interrupted, TrainingError
from chronicals.training.run.evaluation import Evaluation
from chronicals.training.step.metrics import StepMetrics

if TYPE_CHECKING:
    from chronicals.training.run.run_state import Run

logger = logging.getLogger(__name__)


class Callback:
    """Base class of callbacks; override the events you need.

    All events are called on rank 0 only, between steps, while the other ranks wait without a limit.
    They may call the model, for example to generate, unless its weights are divided among the
    ranks. An exception ends the run on all ranks; to end it on purpose, call
    ``ChronicalsTrainer.stop``.
    """

    def run_began(self, run: Run) -> None:
        """Called when the model is prepared and a checkpoint restored, before the first step.

        Args:
            run: state of the run: total steps, steps done, folders. It is kept up to date.
        """

    def step_done(self, metrics: StepMetrics) -> None:
        """Called when the metrics of a step have arrived, while the next step is computed."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Called after an evaluation on held-out data, after ``step`` steps."""

    def saved(self, step: int, folder: Path) -> None:
        """Called when the checkpoint of ``step`` is complete in ``folder``."""

    def run_ended(self, run: Run) -> None:
        """Called at the end of a run, once for each ``run_began``.

        Args:
            run: ``run.outcome`` is "finished" (the model and the report are written), "interrupted"
                (by a signal or ``stop``) or "failed". In the last two cases ``run.error`` says what
                ended it.
        """


class Callbacks:
    """Calls the callbacks of rank 0 when something happens.

    With several ranks, an exception of a callback is kept until all ranks call ``raise_anywhere``,
    so that no rank waits for rank 0 in vain.

    Args:
        callbacks: callbacks of rank 0, called in this order.
        may_call_the_model: True if one of them may call the model.
        divided: the model, if its weights are divided among the ranks; a callback that calls it
            gets an error.

    Attributes:
        error: exception of a callback that has not been raised on all ranks yet.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        may_call_the_model: bool,
        ranks: Mesh,
        divided: nn.Module | None = None,
    ):
        self.callbacks = callbacks
        self.may_call_the_model = may_call_the_model
        self.ranks = ranks
        self._alone: Callable[[], AbstractContextManager[None]] = nullcontext
        if divided is not None and may_call_the_model:
            # An operation that would wait for other ranks raises an error.
            modules = frozenset(divided.modules())
            self._alone = partial(refusing_collectives, modules, _needs_all)
        self.error: BaseException | None = None

    def tell(self, event: Callable[[Callback], None]) -> None:
        """Call ``event`` with each callback in order; after an exception, no more events follow."""
        if self.error is not None:
            return
        try:
            with self._alone():
                for callback in self.callbacks:
                    event(callback)
        except BaseException as error:
            if self.ranks.count == 1:
                raise
            self.error = error

    def raise_anywhere(self) -> None:
        """Raise a callback's exception on rank 0, and a TrainingError with its words elsewhere.

        All ranks must call it.
        """
        if self.ranks.count == 1:
            return
        words = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        words = self.ranks.gather_values(words)[0]
        if self.error is not None:
            raise self.error
        if words is not None:
            raise TrainingError(f"rank 0 stopped: {words}")

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Return a context in which the run is in progress.

        Callbacks whose ``run_began`` was called get ``run_ended`` at its end, however the run ends.
        """
        began: list[Callback] = []

        def begin(callback: Callback) -> None:
            callback.run_began(run)
            began.append(callback)

        try:
            self.tell(begin)
            self.raise_anywhere()
            yield
            run.outcome = "finished"
        except BaseException as error:
            run.outcome = (
                "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
            )
            run.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            with ExitStack() as ending:
                ending.enter_context(self._alone())
                for callback in reversed(began):
                    ending.callback(callback.run_ended, run)


def _needs_all(done: str) -> ConfigurationError:
    return ConfigurationError(
        f"sharding='weights': a callback {done}, which needs every process, and callbacks are "
        "called in the first alone; score "
        "held-out data with eval_steps, load the checkpoint that `saved` is told of, or set "
        "sharding='optimizer'"
    )


class MetricsFile(Callback):
    """Writer of ``metrics.jsonl``: one line for each step and each evaluation.

    Each line has the ``time`` at which it was written, in seconds since 1970 (UTC), and ``null``
    for NaN and infinity. A resumed run first removes the lines after its checkpoint.
    """

    def __init__(self, path: Path):
        self.path = path

    def run_began(self, run: Run) -> None:
        """Remove the lines after the checkpoint that the run resumes from."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["step"] <= run.step]
        aside = self.path.with_suffix(".aside")
        aside.write_text("".join(to_json(line) + "\n" for line in kept))
        os.replace(aside, self.path)

    def step_done(self, metrics: StepMetrics) -> None:
        """Write the step's line."""
        self._append(metrics.to_dict())

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Write the evaluation's line; its metrics begin with ``eval_``."""
        self._append(
            {
                "step": step,
                **{f"eval_{name}": value for name, value in evaluation.to_dict().items()},
            }
        )

    def _append(self, line: dict) -> None:
        with self.path.open("a") as file:
            file.write(to_json({**line, "time": round(time.time(), 3)}) + "\n")


def metrics_line(text: str | bytes) -> dict[str, Any]:
    """Return a line of a ``metrics.jsonl``, in which ``null`` is NaN."""
    values = json.loads(text)
    return {name: math.nan if value is None else value for name, value in values.items()}


def read_metrics(path: Path) -> list[dict]:
    """Return the lines of a ``metrics.jsonl``, without an incomplete last one."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(metrics_line(text))
        except json.JSONDecodeError:
            logger.warning("%s: a line is torn and left out: %.40s", path, text)
    return lines
