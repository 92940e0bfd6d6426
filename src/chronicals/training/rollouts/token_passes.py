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
from chronicals.models.routed_experts import called_for_experts, receiving
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
                values = log_p.float().cpu()
                for number, places in _trained_places(batch).items():
                    found[number] = values[places].tolist()
        with self.limited():
            told = self.ranks.gather_values([[*found], [*found.values()]])
        by_number = {number: values for keys, rows in told for number, values in zip(keys, rows)}
        return np.concatenate([np.array(by_number[n], np.float32) for n in sorted(by_number)])

    @torch.no_grad()
    def experts(self, groups: Sequence[AnswerGroup]) -> dict[int, Tensor]:
        """Return the experts of the tokens of each answer but the last, by its number.

        Of one process; the model is a mixture.

        Args:
            groups: answers, which are trained.

        Returns:
            int64 ``[n - 1, L, k]`` on the host, of each layer with experts.
        """
        batches, _ = self.packs.batches(groups, age=0)
        called = called_for_experts(self.model.model)
        found = dict[int, Tensor]()
        with in_evaluation(self.model.model):
            for batch in batches:
                moved = batch.to(self.precision.device)
                with receiving(called) as received, self.precision.autocast():
                    self.model.as_forward(partial(_hidden_states, self.model, moved))
                experts = torch.stack(received, 1).cpu()
                for number, places in _trained_places(batch).items():
                    # The first of these places is that of the prompt's last token.
                    found[number] = experts[places[1:]]
        return found


def _hidden_states(model: PresentedModel, batch: Batch) -> Tensor:
    """Return the last hidden states of a forward pass, or the model's own logits."""
    return model(batch)[0]


def _trained_places(batch: Batch) -> dict[int, Tensor]:
    """Return the places of the trained tokens of each answer in a Batch, int64, by its number."""
    bounds = batch.cu_seqlens.tolist()
    found = {}
    for place, number in enumerate(batch.segments[ANSWER].tolist()):
        if number >= 0:
            part = batch.targets[bounds[place] : bounds[place + 1]]
            found[number] = bounds[place] + (part != IGNORED).nonzero()[:, 0]
    return found
