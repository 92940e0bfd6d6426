"""Objectives over pairs of answers to one prompt: what their files share.

A row of kind ``preference`` is an item of two documents, of side 0 (chosen, y_w) and 1 (rejected,
y_l). With x the prompt,

    log π(y | x) = Σ_t log π(y_t | x, y_<t)        over the trained tokens of the answer

An objective's own file has its loss, a pure function of such sums, and its settings.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.data.making.store import SIDE_COLUMN
from chronicals.data.packs.step_memory import GROUP_SEGMENT
from chronicals.models import PresentedModel, Term, Terms
from chronicals.objectives.definitions import document_of
from chronicals.objectives.log_probabilities import document_sums, document_targets, score_tokens
from chronicals.objectives.reference import WithReference
from chronicals.objectives.terms import SATURATED, Objective, ScoredDocument

CHOSEN = 0
REJECTED = 1
"""Sides."""

PER_PAIR = "items"
PER_CHOSEN_TOKEN = "first_targets"
"""The counts of a step's pairs, and of the targets of their chosen answers."""


@dataclass(frozen=True)
class Pairs:
    """Both answers of the items of a Batch. There are as many entries, G, as the Batch has
    documents: a number that does not change; entries without an item are not ``there``.

    Attributes:
        chosen, rejected: fp32 ``[G]``, log π of each answer.
        chosen_tokens, rejected_tokens: fp32 ``[G]``, its trained tokens, at least 1.
        there: bool ``[G]``.
        reference_chosen, reference_rejected: fp32 ``[G]``, log π_ref of each answer, where the
            objective has a reference.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    there: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None

    def mean_log_p(self) -> tuple[Tensor, Tensor]:
        """log π over the number of tokens, of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """log π/π_ref of the chosen and the rejected answers."""
        assert self.reference_chosen is not None and self.reference_rejected is not None
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def total(self, values: Tensor) -> Tensor:
        """The sum over the items of ``values`` ``[G]``."""
        return torch.where(self.there, values, 0.0).sum()


def by_item(values: Tensor, batch: Batch, side: int) -> Tensor:
    """``[G]``: of each item the value ``[N]`` of its document of this side, 0 where there is
    none.
    """
    group = batch.segments[GROUP_SEGMENT]
    here = batch.segments[SIDE_COLUMN] == side
    place = torch.where(here, group, len(values))
    return values.new_zeros(len(values) + 1).index_copy(0, place, values * here)[:-1]


def pairs_of(sums: Tensor, batch: Batch, reference: Tensor | None) -> Pairs:
    """Of the log-probabilities ``[N]`` of the documents, and those under the reference."""
    tokens = document_targets(batch, sums.dtype)
    chosen, rejected = (by_item(sums, batch, side) for side in (CHOSEN, REJECTED))
    of_chosen, of_rejected = (by_item(tokens, batch, side) for side in (CHOSEN, REJECTED))
    found = Pairs(chosen, rejected, of_chosen.clamp(min=1), of_rejected.clamp(min=1), of_chosen > 0)
    if reference is None:
        return found
    references = (by_item(reference, batch, side) for side in (CHOSEN, REJECTED))
    return replace(found, **dict(zip(("reference_chosen", "reference_rejected"), references)))


class PairObjective(Objective):
    """Minimises a function of both answers' log-probabilities, the mean over the pairs of a step.

    Attributes:
        name: of the loss among the terms.
        by_token: whether the log-probabilities that are shown are means over an answer's tokens, as
            those of the loss.
    """

    row_kinds: ClassVar[tuple[str, ...]] = ("preference",)
    full_learning_rate: ClassVar[float] = 1e-6
    adapter_learning_rate: ClassVar[float] = 1e-5
    name: ClassVar[str]
    by_token: ClassVar[bool] = False

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        reference = self.reference_sums(model, batch) if isinstance(self, WithReference) else None
        scores = score_tokens(model, batch, self.chunk_size)
        pairs = pairs_of(document_sums(scores.log_p, batch), batch, reference)
        chosen, rejected = pairs.mean_log_p() if self.by_token else (pairs.chosen, pairs.rejected)
        metrics = {
            "logps/chosen": Term(pairs.total(chosen.detach()), 0.0, PER_PAIR),
            "logps/rejected": Term(pairs.total(rejected.detach()), 0.0, PER_PAIR),
            "entropy": Term(scores.entropy.sum(), 0.0),
        }
        if reference is not None:
            of_chosen, of_rejected = pairs.log_ratios()
            metrics["kl"] = Term(pairs.total((of_chosen + of_rejected).detach() / 2), 0.0, PER_PAIR)
        return {**self.terms(pairs), **metrics, **scores.auxiliary}

    def item_definition(self, item: Sequence[ScoredDocument], known: Mapping[str, Tensor]) -> Terms:
        return self.pair_definition(document_of(item, 0), document_of(item, 1))

    def lowest_loss(self) -> float | None:
        """The value that the loss of a pair has, or comes near, where it is flat; None where it
        is flat nowhere.
        """
        return 0.0

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        lowest = self.lowest_loss()
        return None if lowest is None else why_flat(values["loss"], lowest)

    @abstractmethod
    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """What a pair adds to the loss, by the formula (``definitions.py``), and what that is
        divided by.
        """

    @abstractmethod
    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """The loss under ``name``, with what else is minimised, and ``reward_metrics``."""


def why_flat(loss: float, lowest: float = 0.0) -> str | None:
    """The reason why the mean loss of a step's pairs has no gradient; None where it is above the
    value at which it is flat.
    """
    if loss - lowest > SATURATED:
        return None
    return f"the loss of every pair is at its lowest value, {lowest:.4g}"


def binary_entropy(share: float) -> float:
    """− ε log ε − (1 − ε) log(1 − ε): the lowest value of − (1 − ε) log σ(h) − ε log σ(−h),
    where σ(h) = 1 − ε.
    """
    if not share:
        return 0.0
    return -share * math.log(share) - (1 - share) * math.log1p(-share)


def nll_of_chosen(pairs: Pairs, coefficient: float) -> dict[str, Term]:
    """The cross-entropy of the chosen answers, a mean over all their tokens in a step."""
    return {"cross_entropy": Term(-pairs.total(pairs.chosen), coefficient, PER_CHOSEN_TOKEN)}


def reward_metrics(pairs: Pairs, chosen: Tensor, rejected: Tensor) -> Mapping[str, Term]:
    """What is shown of the rewards ``[G]`` of both answers: their means, the margin, and how
    often the chosen one is higher.
    """
    chosen = chosen.detach()
    rejected = rejected.detach()
    found = {
        "chosen": chosen,
        "rejected": rejected,
        "margins": chosen - rejected,
        "accuracies": (chosen > rejected).to(chosen.dtype),
    }
    return {
        f"rewards/{name}": Term(pairs.total(values), 0.0, PER_PAIR)
        for name, values in found.items()
    }
