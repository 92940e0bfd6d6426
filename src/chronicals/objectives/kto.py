"""Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv 2402.01306).

It trains on answers that are judged one by one. By equation 8 and section 4.1,

    r = log π(y|x)/π_ref(y|x)
    z = max(0, mean of r over answers y' of other prompts x),  without a gradient
    loss = λ_D (1 − σ(β (r − z)))  for a good answer
           λ_U (1 − σ(β (z − r)))  for a bad one

z estimates the policy's divergence from the reference. It is a mean over the whole optimizer step
on all ranks, never over a micro-batch. y' is the answer of the nearest earlier row with another
prompt (``data/kinds/preferences.py``). If a row leaves no room for y' in a pack, z is the mean
over the other rows; it is 0 if no row of the step has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.kinds.preferences import JUDGED
from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN
from chronicals.kernels.token_log_probability import LOG_PROBABILITY_WORK, log_probability_bytes
from chronicals.models import PresentedModel, Term, Terms
from chronicals.models.router_loss import COUNTED
from chronicals.objectives.log_probabilities import document_sums, score_tokens
from chronicals.objectives.reference import ReferenceSettings, WithReference
from chronicals.objectives.registry import register
from chronicals.objectives.terms import (
    REFERENCE_POLICY,
    TRAINED_MODEL,
    Count,
    Paper,
    ScoredDocument,
    Value,
    settings,
)

OWN = 0
MISMATCHED = 1
"""Values of the column ``side``: the row's own answer, and another row's answer to its prompt."""

PER_GOOD = "good_items"
PER_BAD = "bad_items"
PER_MISMATCHED = "mismatched_items"
"""Names of the counts of a step's good answers, bad answers, and answers to another prompt."""

FLAT_GAIN = 16.0
"""Size of beta (r - z) beyond which the sigmoid's derivative is at most 1e-7, and 0 on one side in
fp32.
"""

KL = "kl"
"""Segment of every Batch of a step: z."""


def kto_losses(
    r: Tensor, kl: Tensor, good: Tensor, beta: float, desirable: float, undesirable: float
) -> Tensor:
    """Return the loss of each answer, ``[N]``.

    Args:
        r: log-ratios of the answers, ``[N]``.
        kl: z, ``[1]``.
        good: whether an answer is good, bool ``[N]``.
        beta: β.
        desirable: λ_D.
        undesirable: λ_U.
    """
    gain = beta * (r - kl)
    return torch.where(
        good, desirable * (1 - torch.sigmoid(gain)), undesirable * (1 - torch.sigmoid(-gain))
    )


@register("kto")
class KTO(WithReference):
    """An objective that raises the probability of good answers and lowers that of bad ones."""

    row_kinds = (JUDGED,)
    head_bytes = staticmethod(log_probability_bytes)
    head_work = LOG_PROBABILITY_WORK
    papers = (Paper("KTO", "Ethayarajh et al., 2024, eq. 8"),)
    full_learning_rate = 1e-6
    adapter_learning_rate = 1e-5

    @settings
    class Settings(ReferenceSettings):
        """Section ``kto`` of a configuration."""

        beta: float = Field(
            default=0.1, gt=0, description="How strongly the policy is held to the reference"
        )
        desirable_weight: float = Field(default=1.0, gt=0, description="Weight of good answers")
        undesirable_weight: float = Field(default=1.0, gt=0, description="Weight of bad answers")

    def forward_passes(self, config: ChronicalsConfig) -> Sequence[str]:
        """Return the passes of the reference policy, and the policy's for the divergence."""
        return [*super().forward_passes(config), TRAINED_MODEL]

    def before_step(self, model: PresentedModel, batch: Batch) -> tuple[Batch, Terms]:
        """Return the Batch with the reference's log-probabilities, and the sum whose mean is z."""
        reference = self.reference_sums(model, batch)
        sums = document_sums(score_tokens(model, batch, self.chunk_size).log_p, batch)
        mismatched = batch.segments[SIDE_COLUMN] == MISMATCHED
        total = torch.where(mismatched, sums - reference, 0.0).sum()
        # Own answers are the only ones that are trained, by routers too.
        own = batch.segments[SIDE_COLUMN] == OWN
        batch = replace(
            batch, segments={**batch.segments, REFERENCE_POLICY: reference, COUNTED: own}
        )
        return batch, {KL: Term(total, 0.0, PER_MISMATCHED)}

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the loss of the Batch's judged answers and its metrics, as sums."""
        given = self.settings
        segments = batch.segments
        scores = score_tokens(model, batch, self.chunk_size)
        own = segments[SIDE_COLUMN] == OWN
        good = segments[LABEL_COLUMN] == 1
        log_p = document_sums(scores.log_p, batch)
        r = log_p - segments[REFERENCE_POLICY]
        kl = segments[KL].clamp(min=0)
        losses = kto_losses(
            r, kl, good, given.beta, given.desirable_weight, given.undesirable_weight
        )

        def total(values: Tensor, which: Tensor) -> Tensor:
            return torch.where(which, values, 0.0).sum()

        count = own.sum().to(kl.dtype)
        metrics = {}
        for name, values in (("rewards", given.beta * r.detach()), ("logps", log_p.detach())):
            metrics[f"{name}/chosen"] = Term(total(values, own & good), 0.0, PER_GOOD)
            metrics[f"{name}/rejected"] = Term(total(values, own & ~good), 0.0, PER_BAD)
        return {
            "kto": Term(total(losses, own), per="items"),
            "kl": Term(kl.detach()[0] * count, 0.0, "items"),
            "entropy": Term(total(document_sums(scores.entropy, batch), own), 0.0, "first_targets"),
            **metrics,
            **scores.auxiliary,
        }

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return a reason if every mean reward is far from z, where the sigmoid is flat."""
        beta = self.settings.beta
        rewards = [
            values[name] for name in ("rewards/chosen", "rewards/rejected") if name in values
        ]
        if all(abs(reward - beta * values["kl"]) > FLAT_GAIN for reward in rewards):
            return "every answer is so far from the reference that the sigmoid of its gain is flat"
        return None

    def finish_metrics(
        self, values: Mapping[str, Value], counts: Mapping[str, Count]
    ) -> dict[str, Value]:
        """Return the metrics, without means over answers of a label that the step does not have.

        If it has both labels, the margin of their rewards is added.
        """
        absent = []
        if not counts[PER_GOOD]:
            absent.append("/chosen")
        if not counts[PER_BAD]:
            absent.append("/rejected")
        metrics = {
            name: value for name, value in values.items() if not name.endswith(tuple(absent))
        }
        if not absent:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics

    def known_definition(self, item: Sequence[ScoredDocument]) -> Terms:
        """Return the sum of r over the answers to another prompt, which ``z`` is the mean of."""
        mismatched = [document for document in item if document.side == MISMATCHED]
        zero = item[0].logits.new_zeros(())
        ratios = sum((document.log_ratio().sum() for document in mismatched), zero)
        return {"kl": Term(ratios, 0.0, "mismatched_items")}

    def item_definition(self, item: Sequence[ScoredDocument], known: Mapping[str, Tensor]) -> Terms:
        """Return the loss of the item's own answer, by equation 8."""
        given = self.settings
        answer = next(document for document in item if document.side == OWN)
        r = answer.log_ratio().sum()
        z = known["kl"].squeeze().clamp(min=0)
        if answer.label == 1:
            loss = given.desirable_weight * (1 - torch.sigmoid(given.beta * (r - z)))
        else:
            loss = given.undesirable_weight * (1 - torch.sigmoid(given.beta * (z - r)))
        return {"kto": Term(loss, per="items")}
