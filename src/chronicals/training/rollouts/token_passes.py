"""Passes of the trainer over answers that were drawn: log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.distributed import Mesh
from chronicals.models import PresentedModel, in_evaluation
from chronicals.objectives.policy_gradient import ANSWER
from chronicals.training.rollouts.answer_packs import AnswerGroup, AnswerPacks
from chronicals.training.step.optimizer import Precision

TokenScoring = Callable[[PresentedModel, Batch], Tensor]
"""Log-probabilities ``[T]`` of the targets of a Batch."""


class TokenPasses:
    """Passes of a run's model over drawn answers; ranks divide them.

    Args:
        model: the model, whose attention takes document bounds.
        precision: dtypes of the run.
        packs: makes Batches of answers.
        ranks: all ranks of the run.
        limited: context entered where processes wait for each other.
    """

    def __init__(
        self,
        model: PresentedModel,
        precision: Precision,
        packs: AnswerPacks,
        ranks: Mesh,
        limited: Callable[[], AbstractContextManager[None]],
    ):
        self.model = model
        self.precision = precision
        self.packs = packs
        self.ranks = ranks
        self.limited = limited

    @torch.no_grad()
    def log_probabilities(self, groups: Sequence[AnswerGroup], scores: TokenScoring) -> np.ndarray:
        """Return the log-probability of each token of all answers, float32, answer after answer.

        All ranks must call it.

        Args:
            groups: all answers, which are trained, by their numbers from 0.
            scores: of the model and a Batch.
        """
        batches, _ = self.packs.batches(groups, age=0)
        found = dict[int, list[float]]()
        with in_evaluation(self.model.model):
            for batch in batches:
                moved = batch.to(self.precision.device)
                with self.precision.autocast():
                    log_p = self.model.as_forward(partial(scores, self.model, moved))
                found |= _of_answers(log_p.float().cpu(), batch)
        with self.limited():
            told = self.ranks.gather_values([[*found], [*found.values()]])
        by_number = {number: values for keys, rows in told for number, values in zip(keys, rows)}
        return np.concatenate([np.array(by_number[n], np.float32) for n in sorted(by_number)])


def _of_answers(log_p: Tensor, batch: Batch) -> dict[int, list[float]]:
    """Return the values of the trained tokens of each answer in a Batch, by its number."""
    bounds = batch.cu_seqlens.tolist()
    found = {}
    for place, number in enumerate(batch.segments[ANSWER].tolist()):
        if number >= 0:
            part = slice(bounds[place], bounds[place + 1])
            found[number] = log_p[part][batch.targets[part] != IGNORED].tolist()
    return found
