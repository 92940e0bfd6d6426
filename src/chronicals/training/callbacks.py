"""What happens around the loop: the file of metrics, a progress bar. A callback has four methods."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from chronicals.standard_json import to_json
from chronicals.training.evaluation import Evaluation
from chronicals.training.heard import is_heard
from chronicals.training.metrics import StepMetrics

if TYPE_CHECKING:
    from chronicals.training.run import Run

logger = logging.getLogger(__name__)


class Callback:
    """Override what you need; every method is called on the first rank only, and may call the model, to generate say."""

    def run_began(self, run: Run) -> None:
        """Before the first step; ``run`` knows total steps, first step and folders. What it raises stops the run."""

    def step_done(self, metrics: StepMetrics) -> None:
        """When a step's metrics have arrived."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """After an evaluation on held-out data."""

    def run_ended(self, run: Run) -> None:
        """After the last step; ``run.outcome`` says whether the run finished, was interrupted or failed."""


class MetricsFile(Callback):
    """``metrics.jsonl``: a line a step and a line an evaluation; cut back to the checkpoint on resume.

    Each line has the ``time`` at which it was written, in seconds since 1970 (UTC), and ``null`` for what is no number.
    """

    def __init__(self, path: Path):
        self.path = path

    def run_began(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["step"] <= run.step]
        aside = self.path.with_suffix(".aside")
        aside.write_text("".join(to_json(line) + "\n" for line in kept))
        os.replace(aside, self.path)

    def step_done(self, metrics: StepMetrics) -> None:
        self._append(metrics.to_dict())

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._append({"step": step, **{f"eval_{name}": value for name, value in evaluation.to_dict().items()}})

    def _append(self, line: dict) -> None:
        with self.path.open("a") as file:
            file.write(to_json({**line, "time": round(time.time(), 3)}) + "\n")


def read_metrics(path: Path) -> list[dict]:
    """The lines of a ``metrics.jsonl``, with NaN for ``null``; a torn last line is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append({name: math.nan if value is None else value for name, value in json.loads(text).items()})
        except json.JSONDecodeError:
            logger.warning("%s: a line is torn and left out: %.40s", path, text)
    return lines


class ProgressBar(Callback):
    """A bar on a terminal; elsewhere twenty lines a run, logged, or printed where nobody hears the log."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(24), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip

    def run_began(self, run: Run) -> None:
        self.total, self.share = run.total_steps, run.trainable_share
        self.first, self.began = run.step + 1, time.monotonic()
        self.task = self.bar.add_task("", total=run.total_steps, completed=run.step)
        if self.console.is_terminal:
            self.bar.start()

    def step_done(self, metrics: StepMetrics) -> None:
        if metrics.step == self.first:
            self.began = time.monotonic()  # the first step is longer than others
        words = (
            f"loss {metrics.loss:.4f} · grad norm {metrics.grad_norm:.3f} · lr {metrics.learning_rate:.2e} · "
            f"epoch {metrics.epoch:.2f} · {metrics.tokens_per_second:,.0f} tokens/s · {100 * self.share:.3g}% trainable"
            + (f" · {metrics.memory_gib:.1f} GiB" if metrics.memory_gib else "")
            + "".join(f" · {name} {value:.4g}" for name, value in metrics.others.items())
        )
        self.bar.update(self.task, completed=metrics.step, description=words)
        shown = metrics.step in (self.first, self.total) or metrics.step % max(self.total // 20, 1) == 0
        if shown and not self.console.is_terminal:
            self._say(f"step {metrics.step}/{self.total} · {words}{self._time_left(metrics.step)}")

    def _time_left(self, step: int) -> str:
        done = step - self.first
        if not done or step >= self.total:
            return ""
        seconds = round((self.total - step) * (time.monotonic() - self.began) / done)
        return f" · {timedelta(seconds=seconds)} left"

    def _say(self, line: str) -> None:
        if is_heard(logger):
            logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        logger.info("held-out after step %d: %s", step, evaluation)

    def run_ended(self, run: Run) -> None:
        if self.console.is_terminal:
            self.bar.stop()
