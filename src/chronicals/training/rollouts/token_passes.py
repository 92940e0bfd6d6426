"""Passes of the trainer over answers that were drawn: log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.models import PresentedModel, in_evaluation
from chronicals.objectives.policy_gradient import ANSWER
from chronicals.training.rollouts.answer_packs import AnswerPacks, Group
from chronicals.training.session import Session

TokenScoring = Callable[[PresentedModel, Batch], Tensor]
"""Log-probabilities ``[T]`` of the targets of a Batch."""


@torch.no_grad()
def log_probabilities(
    session: Session,
    packs: AnswerPacks,
    groups: Sequence[Group],
    scores: TokenScoring,
    limited: Callable[[], AbstractContextManager[None]],
) -> np.ndarray:
    """Return the log-probability of each token of all answers, float32, answer after answer.

    Each rank computes a part of the answers; all must call it.

    Args:
        session: inside its ``stepping``.
        packs: makes Batches of answers.
        groups: all answers, which are trained, by their numbers from 0.
        scores: of the model and a Batch.
        limited: context entered where processes wait for each other.
    """
    batches, _ = packs.batches(groups, age=0)
    found = dict[int, list[float]]()
    model = session.presented
    with in_evaluation(session.model):
        for batch in batches:
            moved = batch.to(session.precision.device)
            with session.precision.autocast():
                log_p = model.as_forward(partial(scores, model, moved))
            found |= _of_answers(log_p.float().cpu(), batch)
    with limited():
        told = session.ranks.gather_values([[*found], [*found.values()]])
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
