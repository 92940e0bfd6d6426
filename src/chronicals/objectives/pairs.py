"""Base of the objectives over pairs of answers to one prompt.

A row of kind ``preference`` is an item of two documents, of side 0 (chosen, y_w) and 1 (rejected,
y_l). With x the prompt,

    log π(y | x) = Σ_t log π(y_t | x, y_<t)        over the trained tokens of the answer

An objective's own file has its loss, a pure function of such sums, and its settings.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.data.making.store import SIDE_COLUMN
from chronicals.data.packs.step_memory import GROUP_SEGMENT
from chronicals.kernels.token_log_probability import LOG_PROBABILITY_WORK, log_probability_bytes
from chronicals.models import PresentedModel, Term, Terms
from chronicals.objectives.log_probabilities import document_sums, score_tokens
from chronicals.objectives.reference import WithReference
from chronicals.objectives.terms import SATURATED, Objective, ScoredDocument

CHOSEN = 0
REJECTED = 1
"""Values of the column ``side``."""

PER_PAIR = "items"
"""Name of the count of a step's pairs."""

PER_CHOSEN_TOKEN = "first_targets"
"""Name of the count of the targets of their chosen answers."""


@dataclass(frozen=True)
class Pairs:
    """Both answers of the items of a Batch.

    There are as many entries, G, as the Batch has documents, so that shapes do not change from step
    to step; ``there`` is False for entries without an item.

    Attributes:
        chosen, rejected: log π of each answer, fp32 ``[G]``.
        chosen_tokens, rejected_tokens: trained tokens of each answer, at least 1, fp32 ``[G]``.
        there: bool ``[G]``.
        reference_chosen, reference_rejected: log π_ref of each answer, fp32 ``[G]``; None if the
            objective has no reference.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    there: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None

    @classmethod
    def of(cls, sums: Tensor, batch: Batch, reference: Tensor | None) -> Self:
        """Return the pairs of a Batch.

        Args:
            sums: log-probabilities of the documents, ``[N]``.
            batch: Batch of the documents.
            reference: the same under the reference; None if there is none.
        """
        trained = document_sums((batch.targets != IGNORED).to(sums.dtype), batch)
        chosen_tokens = by_item(trained, batch, CHOSEN)
        rejected_tokens = by_item(trained, batch, REJECTED)
        return cls(
            chosen=by_item(sums, batch, CHOSEN),
            rejected=by_item(sums, batch, REJECTED),
            chosen_tokens=chosen_tokens.clamp(min=1),
            rejected_tokens=rejected_tokens.clamp(min=1),
            there=chosen_tokens > 0,
            reference_chosen=None if reference is None else by_item(reference, batch, CHOSEN),
            reference_rejected=None if reference is None else by_item(reference, batch, REJECTED),
        )

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return log π/π_ref of the chosen and of the rejected answers."""
        assert self.reference_chosen is not None and self.reference_rejected is not None
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` ``[G]`` over the items."""
        return torch.where(self.there, values, 0.0).sum()


def by_item(values: Tensor, batch: Batch, side: int) -> Tensor:
    """Pick one document's entry of ``values`` ``[N]`` for each item, ``[G]``; 0 for none.

    Args:
        values: a number for each document.
        batch: Batch of the documents.
        side: side of the document that is picked.
    """
    group = batch.segments[GROUP_SEGMENT]
    here = batch.segments[SIDE_COLUMN] == side
    place = torch.where(here, group, len(values))
    return values.new_zeros(len(values) + 1).index_copy(0, place, values * here)[:-1]


class PairObjective(Objective):
    """An objective over both answers' log-probabilities: a mean over the pairs of a step.

    Attributes:
        name: name of the loss among the terms.
        by_token: True if the loss, and so the metrics, take means over an answer's tokens.
    """

    row_kinds: ClassVar[tuple[str, ...]] = ("preference",)
    head_bytes = staticmethod(log_probability_bytes)
    head_work = LOG_PROBABILITY_WORK
    full_learning_rate: ClassVar[float] = 1e-6
    adapter_learning_rate: ClassVar[float] = 1e-5
    name: ClassVar[str]
    by_token: ClassVar[bool] = False

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the loss of the Batch's pairs and its metrics, as sums."""
        reference = self.reference_sums(model, batch) if isinstance(self, WithReference) else None
        scores = score_tokens(model, batch, self.chunk_size)
        pairs = Pairs.of(document_sums(scores.log_p, batch), batch, reference)
        chosen = pairs.chosen / pairs.chosen_tokens if self.by_token else pairs.chosen
        rejected = pairs.rejected / pairs.rejected_tokens if self.by_token else pairs.rejected
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
        """Return the terms of a pair by ``pair_definition``."""
        by_side = {document.side: document for document in item}
        return self.pair_definition(by_side[CHOSEN], by_side[REJECTED])

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return a reason if the loss of every pair is 0, its limit, where it is flat."""
        return why_flat(values["loss"])

    @abstractmethod
    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """Return the terms of a pair by the formula in plain torch."""

    @abstractmethod
    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return the loss under ``name``, further losses, and ``reward_metrics``."""


def why_flat(loss: float, lowest: float = 0.0) -> str | None:
    """Return why the mean loss of a step's pairs has no gradient; None if it should have one.

    Args:
        loss: the mean over the pairs.
        lowest: value of a pair's loss, or its limit, where it is flat.
    """
    if loss - lowest > SATURATED:
        return None
    return f"the loss of every pair is at its lowest value, {lowest:.4g}"


def binary_entropy(share: float) -> float:
    """Return − ε log ε − (1 − ε) log(1 − ε) for ε = ``share``.

    It is the lowest value of − (1 − ε) log σ(h) − ε log σ(−h), at σ(h) = 1 − ε.
    """
    if not share:
        return 0.0
    return -share * math.log(share) - (1 - share) * math.log1p(-share)


def minus_log_sigmoid(x: Tensor) -> Tensor:
    """Return − log σ(x) = log(1 + e⁻ˣ), for definitions."""
    return torch.logaddexp(torch.zeros_like(x), -x)


def reward_metrics(pairs: Pairs, chosen: Tensor, rejected: Tensor) -> Mapping[str, Term]:
    """Return metrics of rewards: means, the margin, and how often the chosen one is higher.

    Args:
        pairs: the pairs.
        chosen: rewards of the chosen answers, ``[G]``.
        rejected: rewards of the rejected ones.
    """
    chosen = chosen.detach()
    rejected = rejected.detach()
    metrics = {
        "chosen": chosen,
        "rejected": rejected,
        "margins": chosen - rejected,
        "accuracies": (chosen > rejected).to(chosen.dtype),
    }
    return {
        f"rewards/{name}": Term(pairs.total(values), 0.0, PER_PAIR)
        for name, values in metrics.items()
    }
