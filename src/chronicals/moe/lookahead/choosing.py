"""The rule by which a router chooses its k experts from its logits z.

    s = softmax(z), sigmoid(z), sqrt(softplus(z)) or z       scores
    v = s + c        c: a correction that balances loads; weights do not include it
                     (DeepSeek-V3: arXiv 2412.19437, equation 16)

With G groups of experts, the groups with the largest values are kept, and the k largest v in them
are chosen. The value of a group is the largest v of its experts (DeepSeek-V2: arXiv 2405.04434,
section 2.2.2), or the sum of the two largest (DeepSeek-V3).

The rule of a model class is not derived from its name. It is the rule that reproduces the recorded
experts from the logits recorded with them.

Shapes: T tokens, E experts, G groups, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.moe.lookahead.recording import Recorded
from chronicals.moe.router_losses import log_scores, top_k_mask, wide
from chronicals.moe.routers import mixture_layers

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda z: F.softplus(z).sqrt(),
    "logits": lambda z: z,
}
"""Scores of logits ``[..., E]``, rounded as the model classes round them.

``router_losses.SCORES`` has the logarithms of all but the last.
"""

EXPLAINED = 0.95
"""Share of the recorded choices that a rule must reproduce in every layer.

It is below 1 because scores in 16 bits are rounded.
"""

SAMPLE = 1024
"""Number of tokens on which the rules are compared, if that many were recorded."""


@dataclass(frozen=True)
class Choice:
    """A rule that chooses experts.

    Attributes:
        scores: a key of ``FORMULAS``.
        corrected: True if a correction is added to the scores.
        groups, kept_groups: G, and how many groups are kept.
        best_of_group: number of best experts whose sum is the value of a group.
    """

    scores: str = "softmax"
    corrected: bool = False
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1

    @classmethod
    def found(cls, model: Any, recordings: Sequence[Recorded]) -> Self:
        """Find the rule of ``model`` from recordings, preferably of at least ``SAMPLE`` tokens.

        Raises:
            ValueError: no known rule reproduces the chosen experts.
        """
        corrections = [layer.correction for layer in mixture_layers(model)]
        parts = ((recorded.logits, recorded.experts, recorded.weights) for recorded in recordings)
        together = (torch.cat(values, dim=1)[:, :SAMPLE] for values in zip(*parts))
        layers = list(zip(*together, corrections))
        text = model.config.get_text_config()
        groups, kept = (getattr(text, name, None) or 1 for name in ("n_group", "topk_group"))
        grouped = [(groups, kept, best) for best in (2, 1)] if groups > 1 else []
        corrected = [True, False] if all(c is not None for c in corrections) else [False]
        # The first of equally good rules wins, so those that use every feature come first.
        candidates = [
            cls(scores, correct, *limits)
            for correct in corrected
            for limits in [*grouped, (1, 1, 1)]
            for scores in FORMULAS
        ]
        shares = {rule: rule._explains(layers) for rule in candidates}
        rule = max(shares, key=lambda rule: shares[rule])
        if shares[rule][0] < EXPLAINED:
            raise ValueError(
                f"{type(model).__name__}: its routers choose experts in a way that is not known "
                "here (the best of the rules "
                f"that are gives {shares[rule][0]:.1%} of the choices); heads for it cannot be "
                "trained"
            )
        return rule

    @torch.no_grad()
    def _explains(
        self, layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]]
    ) -> tuple[float, float]:
        """Return how well this rule explains the recorded choices; larger is better.

        Args:
            layers: logits, experts, weights and correction of each layer.

        Returns:
            The share of choices it reproduces in its worst layer, and minus the mean distance
            between the recorded weights and its own.
        """
        share = list[Tensor]()
        beside = list[Tensor]()
        for logits, experts, weights, correction in layers:
            order = self.order(logits, correction)
            # Equal values may be chosen either way.
            least = order.topk(experts.shape[-1]).values[:, -1:]
            share.append((order.gather(-1, experts) >= least).float().mean())
            ours = FORMULAS[self.scores](wide(logits)).gather(-1, experts)
            theirs, ours = (x / x.sum(-1, keepdim=True) for x in (wide(weights), ours))
            beside.append((theirs - ours).abs().mean())
        # rounded, so that rules which differ by rounding alone tie and the first candidate wins
        return float(torch.stack(share).min()), -round(float(torch.stack(beside).mean()), 3)

    def values(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        """Return the values v that the choice compares, before groups are excluded, ``[..., E]``.

        They are divided by the slope of the scores at zero logits, so that they differ about as
        much as logits do. If the order depends on the logits only, the logits are returned.

        Args:
            logits: ``[..., E]``.
            correction: ``[E]``.
        """
        logits = wide(logits)
        if not self.corrected and self.groups == 1:
            return logits
        values = FORMULAS[self.scores](logits)
        if self.corrected:
            assert correction is not None
            values = values + wide(correction)
        slopes = {  # derivative of each score at zero logits; that of softmax is about 1 / E
            "softmax": 1 / logits.shape[-1],
            "sigmoid": 0.25,
            "sqrtsoftplus": 0.3,
            "logits": 1.0,
        }
        return values / slopes[self.scores]

    def of_groups(self, values: Tensor) -> Tensor:
        """Return the values of the groups, ``[..., G]``, from those of experts, ``[..., E]``."""
        return (
            values.unflatten(-1, (self.groups, -1)).topk(self.best_of_group, dim=-1).values.sum(-1)
        )

    def kept(self, values: Tensor) -> Tensor:
        """Return a bool mask ``[..., G]`` of the groups that are kept."""
        return top_k_mask(self.of_groups(values), self.kept_groups)

    def order(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        """Return values ``[..., E]`` that rank experts as the router does, the largest first.

        Experts of excluded groups rank below all others.
        """
        values = self.values(logits, correction)
        if self.groups == 1:
            return values
        span = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True) + 1
        excluded = ~self.kept(values).repeat_interleave(values.shape[-1] // self.groups, dim=-1)
        return values - span * excluded

    def log_scores(self, logits: Tensor) -> Tensor:
        """Return log s ``[..., E]``, up to a constant for each token, so that softmax normalises s.

        If scores are plain logits, their softmax is used.
        """
        return log_scores(logits, "softmax" if self.scores == "logits" else self.scores)
