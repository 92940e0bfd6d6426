"""Progress display of a run: two lines on a terminal, else log lines from time to time.

Logging goes to stderr for users who configured none; a configuration of the user's is not changed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chronicals.training.run.callbacks import Callback
from chronicals.training.run.evaluation import Evaluation
from chronicals.training.run.run_state import Run
from chronicals.training.step.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

logger = logging.getLogger(__name__)

LINES_OF_A_RUN = 20
"""Minimum number of log lines of a run without a terminal, if it has as many steps."""

SECONDS_BETWEEN_LINES = 10.0
"""Maximum seconds between log lines, unless a step takes longer."""

MOST_LINES = 2
"""Lines on a terminal, unless the parts that are always shown need more."""

NARROWEST_BAR = 8
WIDEST_BAR = 24
"""Maximum width of the bar in characters."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as parts of a line.

    Attributes:
        step, total: steps done, and all steps.
        metrics: metrics of the last step; None before the first.
        seconds_left: estimated seconds until the end; None if unknown.
    """

    step: int
    total: int
    metrics: StepMetrics | None = None
    seconds_left: float | None = None

    def first_parts(self) -> list[str]:
        """Return the parts that are always shown, and never cut."""
        parts = [f"step {self.step}/{self.total}"]
        if self.metrics is not None:
            parts.append(f"loss {self.metrics.loss:.4f}")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
        return parts

    def further_parts(self) -> list[str]:
        """Return the parts that are shown if there is room, the most important first."""
        metrics = self.metrics
        if metrics is None:
            return []
        parts = [f"grad norm {metrics.grad_norm:.3f}", f"lr {metrics.learning_rate:.2e}"]
        parts += [f"{metrics.tokens_per_second:,.0f} tokens/s"]
        parts += [f"{name} {value:.4g}" for name, value in metrics.others.items()]
        parts += [f"epoch {metrics.epoch:.2f}"]
        return parts + ([f"{metrics.memory_gib:.1f} GiB"] if metrics.memory_gib else [])

    def line(self) -> str:
        """Return all parts in one line of any length."""
        return " · ".join([*self.first_parts(), *self.further_parts()])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        separator = ", " if options.ascii_only else " · "
        step, *rest = self.first_parts()
        parts = [step, *rest]
        # Width of the bar behind the step: 0 if two lines have no room for it. Later parts move to
        # the second line to make room for the bar.
        width = 0
        for first in range(len(parts), 0, -1):
            room = options.max_width - len(separator.join(parts[:first])) - 1
            second = len(separator.join(parts[first:]))
            if room >= NARROWEST_BAR and second <= options.max_width:
                width = min(room, WIDEST_BAR)
                break
        # Lines of whole parts: all of the first parts are there, and as many of the further ones as
        # ``MOST_LINES`` hold.
        lines = [f"{step} {'-' * width}" if width else step]
        for part in rest:
            if len(lines[-1] + separator + part) <= options.max_width:
                lines[-1] += separator + part
            else:
                lines.append(part)
        for part in self.further_parts():
            if len(lines[-1] + separator + part) <= options.max_width:
                lines[-1] += separator + part
            elif len(lines) < MOST_LINES and len(part) <= options.max_width:
                lines.append(part)
        for number, line in enumerate(lines):
            if number or not width:
                yield Text(line, no_wrap=True, overflow="fold")
                continue
            # The bar takes the place of the dashes behind the step.
            start = len(step) + 1
            done = width * min(self.step, self.total) // max(self.total, 1)
            full, empty = ("#", "-") if options.ascii_only else ("━", "─")
            bar = full * done + empty * (width - done)
            text = Text(line[:start] + bar + line[start + width :], no_wrap=True, overflow="fold")
            text.stylize("bar.complete", start, start + done)
            text.stylize("bar.back", start + done, start + width)
            yield text


SECONDS_BETWEEN_DRAWINGS = 0.25
"""Seconds between two drawings in a notebook, whose page gets each as a message."""


class NotebookLine:
    """A line in the output of a notebook's cell that is drawn anew; it needs no widgets."""

    def __init__(self, text: str) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self.handle = display({"text/plain": text}, raw=True, display_id=True)
        self.drawn = time.monotonic()

    def draw(self, text: str, last: bool) -> None:
        """Draw ``text``, at most four times a second; the last one in any case."""
        if last or time.monotonic() - self.drawn > SECONDS_BETWEEN_DRAWINGS:
            self.handle.update({"text/plain": text}, raw=True)
            self.drawn = time.monotonic()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


class ProgressBar(Callback):
    """Two lines with a bar on a terminal, one line in a notebook; else log lines.

    Log lines are printed if logging is not shown.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)

    def run_began(self, run: Run) -> None:
        """Start the display."""
        from rich.live import Live

        self.step, self.total, self.first = run.step, run.total_steps, run.step + 1
        self.metrics: StepMetrics | None = None
        self.began = self.said = time.monotonic()
        self.last_step_at: float | None = None
        self.live = Live(console=self.console, get_renderable=self.now, refresh_per_second=4)
        self.line: NotebookLine | None = None
        if in_notebook():
            self.line = NotebookLine(self.now().line())
        elif self.console.is_terminal:
            self.live.start()

    def step_done(self, metrics: StepMetrics) -> None:
        """Update the display, or log a line if one is due."""
        self.step = metrics.step
        self.metrics = metrics
        self.last_step_at = time.monotonic()
        if metrics.step == self.first:
            self.began = self.last_step_at  # the first step is longer than others
        if self.line is not None:
            self.line.draw(self.now().line(), last=metrics.step == self.total)
            return
        # The first and the last step get a line, some between, and any after which the log would be
        # quiet too long.
        due = (
            metrics.step in (self.first, self.total)
            or metrics.step % max(self.total // LINES_OF_A_RUN, 1) == 0
            or time.monotonic() - self.said + (self._seconds_a_step() or 0.0)
            > SECONDS_BETWEEN_LINES
        )
        if self.console.is_terminal or not due:
            return
        self.said = self.last_step_at
        line = self.now().line()
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def now(self) -> Progress:
        """Return the current progress of the run."""
        left = None
        seconds = self._seconds_a_step()
        if seconds is not None and self.last_step_at is not None and self.step < self.total:
            since = time.monotonic() - self.last_step_at
            left = max((self.total - self.step) * seconds - since, 0.0)
        return Progress(self.step, self.total, self.metrics, left)

    def _seconds_a_step(self) -> float | None:
        """Return the mean seconds a step since the first one; None after fewer than two steps."""
        done = self.step - self.first
        return (
            None
            if self.last_step_at is None or done < 1
            else (self.last_step_at - self.began) / done
        )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Log the evaluation."""
        logger.info("held-out after step %d: %s", step, evaluation)

    def run_ended(self, run: Run) -> None:
        """Stop the display."""
        if self.live.is_started:
            self.live.stop()


PACKAGE_LOGGER = logging.getLogger("chronicals")


class Stderr(logging.StreamHandler):
    """Handler that writes to the current ``sys.stderr``.

    Progress bars, notebooks and tests replace it.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        """The current ``sys.stderr``."""
        return sys.stderr


@contextmanager
def heard(first: bool = True) -> Iterator[None]:
    """Context manager in which our logger writes to stderr, unless a handler is configured.

    Args:
        first: True for the first rank; other ranks write only warnings.
    """
    if PACKAGE_LOGGER.hasHandlers():
        yield
        return
    handler = Stderr()
    level = PACKAGE_LOGGER.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.NOTSET if first else logging.WARNING)
    PACKAGE_LOGGER.addHandler(handler)
    if level == logging.NOTSET:
        PACKAGE_LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        PACKAGE_LOGGER.setLevel(level)
        PACKAGE_LOGGER.removeHandler(handler)
