"""Where a run stands, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chronicals.training.audit import Coverage
from chronicals.training.evaluation import Evaluation

KEPT = ("step", "position", "applied", "skipped_in_a_row", "best_loss", "evaluations_without_gain", "last_loss")
"""Attributes of a run that a checkpoint keeps, beside the evaluation; in JSON NaN and infinity are null."""

NO_NUMBER = {"best_loss": float("inf"), "last_loss": float("nan")}
"""What null stands for."""

Outcome = Literal["finished", "interrupted", "failed"]


@dataclass
class Run:
    """Where a run stands.

    Attributes:
        total_steps: steps after which it is done.
        output_dir: where it is written.
        step: steps done.
        position: packs consumed by all ranks.
        applied: steps that changed the weights.
        trainable_share: of all parameters.
        best_loss, evaluations_without_gain: for early stopping.
        skipped_in_a_row: steps without an update just now.
        last_loss: of the last step whose metrics have arrived.
        evaluation: the last one, if there was any.
        coverage: the first-step audit; None where the run was resumed past it.
        outcome: how it ended; ``failed`` until it has ended in another way.
    """

    total_steps: int
    output_dir: Path
    step: int = 0
    position: int = 0
    applied: int = 0
    trainable_share: float = 0.0
    best_loss: float = float("inf")
    evaluations_without_gain: int = 0
    skipped_in_a_row: int = 0
    last_loss: float = float("nan")
    evaluation: Evaluation | None = None
    coverage: Coverage | None = None
    outcome: Outcome = "failed"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        kept = {name: getattr(self, name) for name in KEPT}
        return {**kept, "evaluation": self.evaluation and self.evaluation.to_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        earlier = {"applied": state["step"], "skipped_in_a_row": 0}  # not in checkpoints of 0.1.0's first versions
        kept = {**earlier, **state}
        for name in KEPT:
            setattr(self, name, NO_NUMBER[name] if kept[name] is None else kept[name])
        self.evaluation = state["evaluation"] and Evaluation(**state["evaluation"])

    def evaluated(self, evaluation: Evaluation) -> None:
        better = evaluation.loss < self.best_loss
        self.evaluation = evaluation
        self.best_loss = min(self.best_loss, evaluation.loss)
        self.evaluations_without_gain = 0 if better else self.evaluations_without_gain + 1


@dataclass(frozen=True)
class TrainingResult:
    """What came out.

    Attributes:
        steps: done in all, earlier parts of a resumed run included.
        loss: of the last step.
        evaluation: on held-out data after the last step, if there was any.
        coverage: the first-step audit; None where the run was resumed past it.
        model_dir: the trained model (or adapter) with its tokenizer.
        report: the page with the curves.
    """

    steps: int
    loss: float
    evaluation: Evaluation | None
    coverage: Coverage | None
    model_dir: Path
    report: Path
