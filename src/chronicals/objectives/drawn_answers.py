"""Formulas over the tokens of answers that the model itself has drawn.

They are parts of the objectives of ``policy_gradient.py``. sg is a value without its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, document_at
from chronicals.objectives.log_probabilities import document_sums

KL = Literal["k1", "k2", "k3"]
Importance = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def clipped_losses(
    ratio: Tensor, advantage: Tensor, low: float, high: float, bound: float | None = None
) -> Tensor:
    """Return the clipped surrogate of PPO (Schulman et al., 2017, equation 7), negated.

        − min(min(r, δ) A, clip(r, 1 − ε_low, 1 + ε_high) A)

    Args:
        ratio: r.
        advantage: A.
        low: ε_low.
        high: ε_high, larger than ε_low in DAPO (Yu et al., 2025, equation 10).
        bound: δ, which bounds the ratio of bad answers too (INTELLECT-2, 2025, section 3.4).
    """
    clipped = ratio.clamp(1 - low, 1 + high)
    bounded = ratio if bound is None else ratio.clamp(max=bound)
    return -torch.minimum(bounded * advantage, clipped * advantage)


def divergence(
    log_p: Tensor, reference: Tensor, ratio: Tensor, kl: KL, weighted: bool = True
) -> Tensor:
    """Return the estimate of KL(π ‖ π_ref) at each drawn token, with d = log π − log π_ref.

        k1   r · sg(d)          the own gradient of d has mean 0 (Schulman, 2020)
        k2   sg(r) · d² / 2
        k3   r · (e⁻ᵈ + d − 1)  equation 4 of Shao et al., 2024, and with the ratio the gradient of
                                the divergence (DeepSeek-V3.2, 2025, equation 7)

    Args:
        log_p: log π of the tokens.
        reference: log π_ref of them.
        ratio: r = π / π_old.
        kl: which estimator.
        weighted: weigh k2 and k3 by the ratio.
    """
    difference = log_p - reference
    if kl == "k1":
        return ratio * difference.detach()
    if kl == "k2":
        estimate = difference.square() / 2
        return estimate * ratio.detach() if weighted else estimate
    estimate = torch.exp(-difference) + difference - 1
    return estimate * ratio if weighted else estimate


class Answers:
    """The trained tokens of a Batch, and means over the documents that they belong to.

    Attributes:
        trained: bool ``[T]``.
        tokens: trained tokens of each document, at least 1, ``[N]``.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        places = torch.arange(len(batch), device=batch.targets.device)
        self._document = document_at(places, batch.cu_seqlens)
        self.trained = batch.targets != IGNORED
        self.tokens = document_sums(self.trained.float(), batch).clamp(min=1)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the value ``[N]`` of its document at each token, ``[T]``."""
        return values[self._document]

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` ``[T]`` over each document's trained tokens, ``[N]``."""
        return document_sums(torch.where(self.trained, values, 0.0), self._batch)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` ``[T]`` over each document's trained tokens, ``[N]``."""
        return self.sums(values) / self.tokens

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` ``[T]`` over all trained tokens."""
        return torch.where(self.trained, values, 0.0).sum()


def importance_weights(
    old: Tensor, drawn: Tensor, answers: Answers, how: Importance, cap: float
) -> tuple[Tensor, Tensor]:
    """Return the weight π_old / π_drawn of each token (Yao et al., 2025), and which are cut, ``[T]``.

    Args:
        old: log-probabilities by the trainer's own pass when the answers were drawn, ``[T]``.
        drawn: log-probabilities of the draws, ``[T]``.
        answers: of the Batch.
        how: by token, or by sequence: the product over its tokens. What exceeds the cap is set to
            it, or to 0.
        cap: of the weights.
    """
    log_weight = torch.where(answers.trained, old - drawn, 0.0)
    if how.startswith("sequence"):
        log_weight = answers.of_tokens(answers.sums(log_weight))
    weight = log_weight.exp()
    cut = weight > cap
    return torch.where(cut, cap if how.endswith("truncate") else 0.0, weight), cut
