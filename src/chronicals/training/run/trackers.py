"""Experiment trackers: TensorBoard, Weights & Biases, MLflow.

A tracker gets the configuration once, the metrics of every step under ``train/`` and every
evaluation under ``eval/``. A resumed run is continued in the tracker: ``trackers.json`` holds its
id, and points that the tracker lacks are sent again from ``metrics.jsonl``. The loop never waits
for a tracker, and no tracker can stop it: each has a thread that sends what has arrived and retries
on failure. The log says what could not be stored.

The clients' own queues do not ensure this. TensorBoard's holds a few events and blocks the caller
when it is full, and a disk error ends its thread and drops the rest. MLflow's drops a batch that
the server refused. W&B's call writes to a socket, which blocks while its process does not read.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.recipe import METRICS_FILE
from chronicals.standard_json import to_json
from chronicals.training.run.callbacks import Callback, read_metrics
from chronicals.training.run.evaluation import Evaluation
from chronicals.training.run.run_state import Run, RunOutcome
from chronicals.training.step.metrics import StepMetrics

logger = logging.getLogger(__name__)

PARTS = "train", "eval"

TRACKER_IDS = "trackers.json"
"""File in a run's folder: the run's id in each tracker."""

SECONDS_TO_STORE_THE_REST = 60.0
"""Maximum seconds that the end of a run waits for a tracker to store the rest."""

MAX_WAITING = 10_000
"""Maximum number of points that wait for a tracker, some 13 MB; the oldest are dropped first."""


@dataclass(frozen=True)
class Point:
    """Values of one step under the tracker's names, with their time (seconds since 1970)."""

    step: int
    values: dict[str, float]
    time: float


class Tracker(Callback, ABC):
    """Base class of trackers: a check at the start, a thread, and retries.

    Subclasses implement ``begin``, ``store`` and ``end``.

    Attributes:
        name: name in the field ``trackers`` and of the extra that installs it.
        module: package that must be installed.
        used: module that is imported, if not ``module``.
        remedy: advice if it cannot be started.
        rest: seconds between two calls of ``store``, if a call for each step would cost too much.

    Raises:
        ConfigurationError: the package is not installed.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    used: ClassVar[str] = ""
    remedy: ClassVar[str]
    rest: ClassVar[float] = 0.0

    def __init__(self, config: ChronicalsConfig):
        if not self.installed():
            raise ConfigurationError(
                f"trackers: {self.name!r} is not installed; pip install "
                f"'chronicals[{self.name}]', or leave it out of trackers"
            )
        self.config = config
        threading.Thread(target=self._import, daemon=True).start()

    def _import(self) -> None:
        """Import what ``begin`` needs, while model and data are prepared.

        ``begin`` raises the errors.
        """
        with suppress(Exception):
            importlib.import_module(self.used or self.module)

    @classmethod
    def installed(cls) -> bool:
        """Return whether the package is installed.

        A folder with the package's name, such as W&B's run folder, has no origin and does not
        count.
        """
        found = importlib.util.find_spec(cls.module)
        return found is not None and found.origin is not None

    # --- methods of subclasses

    @abstractmethod
    def begin(self, run: Run) -> dict[str, int]:
        """Begin a run, or continue the earlier one if ``run.step`` is not 0.

        Returns:
            The last stored steps of ``train`` and ``eval``; earlier points are not sent again.
        """

    @abstractmethod
    def store(self, points: list[Point]) -> None:
        """Store points in ascending order of steps.

        After an exception the same points are passed again.
        """

    @abstractmethod
    def end(self, outcome: RunOutcome) -> None:
        """Mark how the run ended, and close."""

    # --- events of the run, in the main thread

    def run_began(self, run: Run) -> None:
        """Start the tracker; raises ConfigurationError if it cannot be started."""
        try:
            self.stored = self.begin(run)
        except Exception as error:
            raise ConfigurationError(
                f"trackers: {self.name!r} cannot be started ({self.remedy}, or leave it out of "
                f"trackers): {error}"
            ) from error
        self.arrivals: queue.SimpleQueue[Point | RunOutcome] = queue.SimpleQueue()
        for part, step, values in _known(run):
            if step <= run.step:
                self._offer(part, step, values)
        self.over = threading.Event()
        self.thread = threading.Thread(
            target=self._hand_over, name=f"chronicals-{self.name}", daemon=True
        )
        self.thread.start()

    def step_done(self, metrics: StepMetrics) -> None:
        """Hand the step's metrics to the thread."""
        self._offer("train", metrics.step, metrics.to_dict())

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Hand the evaluation to the thread."""
        self._offer("eval", step, evaluation.to_dict())

    def run_ended(self, run: Run) -> None:
        """Tell the thread how the run ended, and wait for it, but not for ever."""
        self.arrivals.put(run.outcome)
        self.over.set()
        self.thread.join(SECONDS_TO_STORE_THE_REST)
        if self.thread.is_alive():
            logger.warning(
                "%s: still not done %.0f s after the run; it is left to itself",
                self.name,
                SECONDS_TO_STORE_THE_REST,
            )

    def _offer(self, part: str, step: int, values: dict[str, float]) -> None:
        if step > self.stored.get(part, 0):
            named = {
                f"{part}/{name}": float(value) for name, value in values.items() if name != "step"
            }
            self.arrivals.put(Point(step, named, time.time()))

    # --- methods of the thread

    def _hand_over(self) -> None:
        waiting: list[Point] = []
        outcome = None
        complained = False
        given_up = 0
        while outcome is None:
            arrivals = [self.arrivals.get()]
            while not self.arrivals.empty():
                arrivals.append(self.arrivals.get())
            for arrival in arrivals:
                if isinstance(arrival, Point):
                    waiting.append(arrival)
                else:
                    outcome = arrival
            try:
                self.store(waiting)
                waiting = []
            except Exception as error:
                if not complained:
                    logger.error(
                        "%s: cannot store what arrives, training goes on: %s", self.name, error
                    )
                complained = True
                given_up += max(len(waiting) - MAX_WAITING, 0)
                waiting = waiting[-MAX_WAITING:]
            self.over.wait(self.rest)
        if waiting or given_up:
            logger.error(
                "%s: %d points were not stored; metrics.jsonl has them",
                self.name,
                len(waiting) + given_up,
            )
        try:
            self.end(outcome)
        except Exception as error:
            logger.error(
                "%s: the end of the run (%s) could not be marked: %s", self.name, outcome, error
            )


class TensorBoard(Tracker):
    """Event files in ``tensorboard/`` of the run's folder.

    On resume, events after the checkpoint are purged and stored again. TensorBoard has no mark for
    how a run ended.
    """

    name = "tensorboard"
    module = "tensorboard"
    used = "torch.utils.tensorboard"
    remedy = "make output_dir writable"

    def begin(self, run: Run) -> dict[str, int]:
        """Open event files, or go on with those of the earlier part after its checkpoint."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.output_dir / "tensorboard"
        earlier = run.step and folder.exists()
        self.writer = SummaryWriter(folder, purge_step=run.step + 1)
        if not earlier:
            lines = to_json(self.config.to_dict(), indent=1).splitlines()
            self.writer.add_text("configuration", "\n".join(f"    {line}" for line in lines))
        return dict.fromkeys(PARTS, run.step) if earlier else {}

    def store(self, points: list[Point]) -> None:
        """Write an event for each value."""
        for point in points:
            for name, value in point.values.items():
                self.writer.add_scalar(name, value, point.step, walltime=point.time)

    def end(self, outcome: RunOutcome) -> None:
        """Close the event files."""
        self.writer.close()


class WeightsAndBiases(Tracker):
    """A run in the W&B project.

    Server and account are W&B's settings (``wandb login``, ``WANDB_MODE``, ...).

    W&B accepts only ascending steps and cannot remove any. After a resume, steps that it already
    has keep their first values, and the run continues after them. Offline, each part is a folder in
    ``wandb/`` of the run's folder, all with one run id, which ``wandb sync`` joins; it is then
    assumed to have stored what ``metrics.jsonl`` holds. An interrupted run is marked killed.
    """

    name = "wandb"
    module = "wandb"
    remedy = "run `wandb login`, or set WANDB_MODE=offline to store now and `wandb sync` later"
    EXIT_CODES: ClassVar[dict[RunOutcome, int]] = {"finished": 0, "failed": 1, "interrupted": 255}
    """Exit code by outcome; 255 is what W&B itself reports for a program ended by Ctrl-C."""

    def begin(self, run: Run) -> dict[str, int]:
        """Begin a run of W&B, or continue the one that ``trackers.json`` names."""
        import wandb

        earlier = earlier_id(run, self.name)
        self.run = wandb.init(
            project=self.config.project,
            name=self.config.run_name,
            dir=run.output_dir.absolute(),
            id=earlier,
            resume="allow" if earlier else None,
            reinit="create_new",
        )
        self.run.config.update(self.config.to_dict(), allow_val_change=True)
        keep_id(run, self.name, self.run.id)
        if not earlier:
            return {}
        if self.run.resumed:
            return dict.fromkeys(PARTS, self.run.starting_step - 1)
        return {part: step for part, step, _ in _known(run)}

    def store(self, points: list[Point]) -> None:
        """Log the values of each step."""
        for point in points:
            self.run.log(point.values, step=point.step)

    def end(self, outcome: RunOutcome) -> None:
        """Finish the run with the outcome's exit code."""
        self.run.finish(exit_code=self.EXIT_CODES[outcome])


class MLflow(Tracker):
    """A run in the experiment ``project`` of MLflow.

    It is at MLflow's tracking URI, by default ``sqlite:///mlflow.db``.

    MLflow cannot remove values or change parameters. After a resume, steps that it already has keep
    their first values, and changed fields become tags ``resumed.FIELD``. An interrupted run is
    marked killed.
    """

    name = "mlflow"
    module = "mlflow"
    remedy = (
        "a local store needs pip install 'chronicals[mlflow]'; MLFLOW_TRACKING_URI says "
        "where a server is"
    )
    rest = 1.0
    STATES: ClassVar[dict[RunOutcome, str]] = {
        "finished": "FINISHED",
        "failed": "FAILED",
        "interrupted": "KILLED",
    }
    AT_ONCE = 1000
    """Maximum number of values that MLflow accepts in one call."""

    def begin(self, run: Run) -> dict[str, int]:
        """Begin a run of MLflow, or continue the one that ``trackers.json`` names."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME

        self.client = MlflowClient()
        fields = {name: str(value) for name, value in self.config.to_dict().items()}
        earlier = earlier_id(run, self.name)
        if earlier:
            self.id = earlier
            self.client.update_run(earlier, status="RUNNING")
            known = self.client.get_run(earlier).data.params
            for name in [name for name in fields if known.get(name) != fields[name]]:
                self.client.set_tag(earlier, f"resumed.{name}", fields[name])
            last = {}
            for part in PARTS:
                stored = self.client.get_metric_history(earlier, f"{part}/loss")
                last[part] = max((value.step for value in stored), default=0)
            return last
        project = self.config.project or MLFLOW_EXPERIMENT_NAME.get()
        if project is None:
            experiment = MLFLOW_EXPERIMENT_ID.get() or "0"  # "0" is MLflow's default experiment
        else:
            found = self.client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self.client.create_experiment(project)
        created = self.client.create_run(experiment, run_name=self.config.run_name)
        self.id = created.info.run_id
        keep_id(run, self.name, self.id)
        self.client.log_batch(
            self.id, params=[Param(name, value) for name, value in fields.items()]
        )
        return {}

    def store(self, points: list[Point]) -> None:
        """Log the values, as many in a call as MLflow accepts."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, v, int(1000 * p.time), p.step)
            for p in points
            for name, v in p.values.items()
        ]
        for start in range(0, len(metrics), self.AT_ONCE):
            self.client.log_batch(self.id, metrics=metrics[start : start + self.AT_ONCE])

    def end(self, outcome: RunOutcome) -> None:
        """Set the run's status to the outcome's."""
        self.client.set_terminated(self.id, self.STATES[outcome])


TRACKERS: dict[str, type[Tracker]] = {
    tracker.name: tracker for tracker in (TensorBoard, WeightsAndBiases, MLflow)
}


def build_trackers(config: ChronicalsConfig) -> list[Tracker]:
    """Build the trackers that ``config.trackers`` names.

    If the field was not set, it is TensorBoard, if that is installed. A project or a name of the
    run that no tracker shows is logged.

    Raises:
        ConfigurationError: one is not installed; the message names the extra.
    """
    names = config.trackers
    if names is None:
        names = ["tensorboard"] if TensorBoard.installed() else []
    if not {WeightsAndBiases.name, MLflow.name} & set(names):
        for name in ("project", "run_name"):
            value = getattr(config, name)
            if value is not None:
                logger.warning(
                    "%s=%r is shown nowhere: W&B and MLflow have it, and the trackers of this run "
                    "are %s; set trackers=['wandb'] or trackers=['mlflow'], or leave it out",
                    name,
                    value,
                    " and ".join(names) or "none",
                )
    return [TRACKERS[name](config) for name in dict.fromkeys(names)]


# --- identity of a run in its tracker


def earlier_id(run: Run, tracker: str) -> str | None:
    """Return the tracker's name for the run that is now resumed; None for a new one."""
    path = run.output_dir / TRACKER_IDS
    if not run.step or not path.exists():
        return None
    return json.loads(path.read_text()).get(tracker)


def keep_id(run: Run, tracker: str, identity: str) -> None:
    """Store the tracker's id of this run."""
    path = run.output_dir / TRACKER_IDS
    ids = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".aside")
    aside.write_text(to_json({**ids, tracker: identity}, indent=1))
    os.replace(aside, path)


def _known(run: Run) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield the metrics of the earlier part that ``metrics.jsonl`` holds.

    They are ``train`` or ``eval``, the step, and the values.
    """
    for line in read_metrics(run.output_dir / METRICS_FILE):
        step = line.pop("step")
        line.pop("time", None)
        if "eval_loss" in line:
            yield "eval", step, {name.removeprefix("eval_"): value for name, value in line.items()}
        else:
            yield "train", step, line
