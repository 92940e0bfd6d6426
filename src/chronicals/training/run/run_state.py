"""State of a run, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chronicals.config import ChronicalsConfig
from chronicals.training.run.evaluation import Evaluation
from chronicals.training.step.audit import Coverage

_KEPT = (
    "step",
    "position",
    "applied",
    "without_gradient",
    "skipped_in_a_row",
    "best_loss",
    "best_step",
    "evaluations_without_gain",
    "last_loss",
)
"""Attributes of a run that a checkpoint keeps, besides the evaluations.

In JSON, NaN and infinity are null.
"""

EVALUATIONS = ("evaluation", "best_evaluation")
"""Attributes that hold an ``Evaluation`` or None."""

NO_NUMBER = {"best_loss": float("inf"), "last_loss": float("nan")}
"""Values that null stands for, by attribute."""

RunOutcome = Literal["finished", "interrupted", "failed"]


@dataclass
class Run:
    """State of a run.

    Attributes:
        total_steps: number of steps of the whole run.
        output_dir: folder of the run.
        step: steps done.
        position: state of the run's ``Steps``, not read here; None at the beginning.
        applied: steps whose gradient was applied to the weights.
        without_gradient: steps with a flat loss that the objective has explained.
        trainable_share: fraction of all parameters that are trained.
        best_loss, evaluations_without_gain: lowest held-out loss, and evaluations since then; for
            early stopping.
        best_step, best_evaluation: step of the lowest held-out loss, and its evaluation; None
            before the first.
        skipped_in_a_row: current number of consecutive steps without an update.
        last_loss: loss of the last step whose metrics have arrived.
        evaluation: the last evaluation, or None.
        coverage: the first-step audit; None if the run was resumed after it.
        outcome: how the run ended; ``failed`` until it ends otherwise.
        error: message of the error that ended it, or None.
    """

    total_steps: int
    output_dir: Path
    step: int = 0
    position: Any = None
    applied: int = 0
    without_gradient: int = 0
    trainable_share: float = 0.0
    best_loss: float = float("inf")
    best_step: int | None = None
    evaluations_without_gain: int = 0
    skipped_in_a_row: int = 0
    last_loss: float = float("nan")
    evaluation: Evaluation | None = None
    best_evaluation: Evaluation | None = None
    coverage: Coverage | None = None
    outcome: RunOutcome = "failed"
    error: str | None = None

    def state(self) -> dict[str, Any]:
        """Return the part of the state that a checkpoint keeps, as JSON."""
        kept = {name: getattr(self, name) for name in _KEPT}
        evaluations = {name: getattr(self, name) for name in EVALUATIONS}
        return kept | {
            name: evaluation and evaluation.to_dict() for name, evaluation in evaluations.items()
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Set the part of the state that a checkpoint keeps."""
        unknown = {"best_step": None, "best_evaluation": None}
        # not in checkpoints of 0.1.0's first versions
        earlier = {
            "applied": state["step"],
            "without_gradient": 0,
            "skipped_in_a_row": 0,
            **unknown,
        }
        kept = {**earlier, **state}
        for name in _KEPT:
            setattr(self, name, NO_NUMBER.get(name) if kept[name] is None else kept[name])
        for name in EVALUATIONS:
            setattr(self, name, kept[name] and Evaluation.from_dict(kept[name]))

    def gains_no_more(self, config: ChronicalsConfig) -> bool:
        """Return whether the held-out loss has not fallen for long enough to stop early."""
        patience = config.early_stopping_patience
        return patience is not None and self.evaluations_without_gain >= patience

    def evaluated(self, evaluation: Evaluation) -> bool:
        """Record an evaluation; return whether it is the best so far."""
        better = evaluation.loss < self.best_loss
        self.evaluation = evaluation
        if better:
            self.best_loss = evaluation.loss
            self.best_step = self.step
            self.best_evaluation = evaluation
        self.evaluations_without_gain = 0 if better else self.evaluations_without_gain + 1
        return better


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run.

    Attributes:
        steps: all steps, including earlier parts of a resumed run.
        model_step: step whose weights are in ``model_dir`` and in memory: that of the lowest
            held-out loss, or the last one (``keep``).
        loss: loss of the last step.
        evaluation: evaluation of those weights on held-out data, or None.
        coverage: the first-step audit; None if the run was resumed after it.
        model_dir: the trained model (or adapter) with its tokenizer.
        report: the page with the curves.
    """

    steps: int
    model_step: int
    loss: float
    evaluation: Evaluation | None
    coverage: Coverage | None
    model_dir: Path
    report: Path
