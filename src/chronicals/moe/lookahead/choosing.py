"""How a router chooses its k experts from its logits z.

    s = softmax(z), sigmoid(z), sqrt(softplus(z)) or z       scores
    v = s + c                                                 c: a correction that balances loads and is no part of the weights
                                                              (DeepSeek-V3: arXiv 2412.19437,
                                                              equation 16)
    of G groups of experts those with the largest values are kept, and the k largest v in them are
    chosen; a group's value is the largest v of its experts (DeepSeek-V2: arXiv 2405.04434, section
    2.2.2), or the sum of the two largest (DeepSeek-V3)

Which of these a class does is not read from its name: it is the one that gives the experts that
were recorded from the logits that were recorded beside them.

Shapes: T tokens, E experts, G groups, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.moe.lookahead.recording import Recorded
from chronicals.moe.mixture_parts import mixture_layers
from chronicals.moe.router_losses import log_scores, wide

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda z: F.softplus(z).sqrt(),
    "logits": lambda z: z,
}
"""Scores of logits ``[..., E]``, rounded as in the classes; ``router_losses.SCORES`` has
logarithms of all but the last.
"""

EXPLAINED = 0.95
"""Least share of recorded choices that a rule must give in every layer; not all, for scores in
16 bits are rounded.
"""

SAMPLE = 1024
"""Tokens that rules are tried on, where there are so many."""


@dataclass(frozen=True)
class Choice:
    """A rule by which experts are chosen.

    Attributes:
        scores: a key of ``FORMULAS``.
        corrected: whether a correction is added to scores.
        groups, kept_groups: G, and how many are chosen from.
        best_of_group: of how many of its best experts a group's value is the sum.
    """

    scores: str = "softmax"
    corrected: bool = False
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1

    @classmethod
    def found(cls, model: Any, recordings: Sequence[Recorded]) -> Self:
        """The rule of a mixture, from what was recorded of it, best of ``SAMPLE`` tokens or more.

        Raises:
            ValueError: no rule known here gives the experts that were chosen.
        """
        corrections = [layer.correction for layer in mixture_layers(model)]
        parts = ((recorded.logits, recorded.experts, recorded.weights) for recorded in recordings)
        together = (torch.cat(values, dim=1)[:, :SAMPLE] for values in zip(*parts))
        layers = list(zip(*together, corrections))
        shares = {
            rule: rule._explains(layers) for rule in cls._candidates(model.config, corrections)
        }
        rule = max(shares, key=lambda rule: shares[rule])
        if shares[rule][0] < EXPLAINED:
            raise ValueError(
                f"{type(model).__name__}: its routers choose experts in a way that is not known "
                "here (the best of the rules "
                f"that are gives {shares[rule][0]:.1%} of the choices); heads for it cannot be "
                "trained"
            )
        return rule

    @classmethod
    def _candidates(cls, config: Any, corrections: Sequence[Tensor | None]) -> list[Self]:
        """Those with all that the model has first."""
        text = config.get_text_config()
        groups, kept = (getattr(text, name, None) or 1 for name in ("n_group", "topk_group"))
        grouped = [(groups, kept, best) for best in (2, 1)] if groups > 1 else []
        corrected = [True, False] if all(c is not None for c in corrections) else [False]
        return [
            cls(scores, correct, *limits)
            for correct in corrected
            for limits in [*grouped, (1, 1, 1)]
            for scores in FORMULAS
        ]

    @torch.no_grad()
    def _explains(
        self, layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]]
    ) -> tuple[float, float]:
        """Of layers' logits, experts, weights and corrections: the share of the choices that are
        this rule's, in the layer where it is least, then how near the weights are to its scores:
        0 is equal."""
        share = list[Tensor]()
        beside = list[Tensor]()
        for logits, experts, weights, correction in layers:
            order = self.order(logits, correction)
            least = order.topk(experts.shape[-1]).values[
                :, -1:
            ]  # equal values may be chosen either way
            share.append((order.gather(-1, experts) >= least).float().mean())
            ours = FORMULAS[self.scores](wide(logits)).gather(-1, experts)
            theirs, ours = (x / x.sum(-1, keepdim=True) for x in (wide(weights), ours))
            beside.append((theirs - ours).abs().mean())
        return float(torch.stack(share).min()), -round(float(torch.stack(beside).mean()), 3)

    @property
    def in_order(self) -> bool:
        """Whether the experts with the largest logits are chosen."""
        return not self.corrected and self.groups == 1

    def values(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        """``[..., E]``: what the choice compares, before groups are left out, over the slope that
        scores have where all logits are 0, so that it differs about as logits do. Where logits
        alone decide the order it is they.

        Args:
            logits: ``[..., E]``.
            correction: ``[E]``.
        """
        logits = wide(logits)
        if self.in_order:
            return logits
        values = FORMULAS[self.scores](logits)
        if self.corrected:
            assert correction is not None
            values = values + wide(correction)
        slopes = {
            "softmax": 1 / logits.shape[-1],
            "sigmoid": 0.25,
            "sqrtsoftplus": 0.3,
            "logits": 1.0,
        }
        return values / slopes[self.scores]

    def of_groups(self, values: Tensor) -> Tensor:
        """``[..., G]`` of ``values`` ``[..., E]``."""
        return (
            values.unflatten(-1, (self.groups, -1)).topk(self.best_of_group, dim=-1).values.sum(-1)
        )

    def kept(self, values: Tensor) -> Tensor:
        """bool ``[..., G]``: the groups that are chosen from."""
        of_groups = self.of_groups(values)
        return torch.zeros_like(of_groups, dtype=torch.bool).scatter(
            -1, of_groups.topk(self.kept_groups).indices, True
        )

    def of_experts(self, groups: Tensor, experts: int) -> Tensor:
        """``[..., E]``: of each expert what is said of its group, ``[..., G]``."""
        return groups.repeat_interleave(experts // self.groups, dim=-1)

    def order(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        """``[..., E]``: the larger, the sooner an expert is chosen. Those of groups that are
        left out come after all others.
        """
        values = self.values(logits, correction)
        if self.groups == 1:
            return values
        span = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True) + 1
        return values - span * ~self.of_experts(self.kept(values), values.shape[-1])

    def log_scores(self, logits: Tensor) -> Tensor:
        """``[..., E]``, up to a constant of the token: their softmax is the share of each score
        in the sum of all. Plain logits stand for themselves."""
        return log_scores(logits, "softmax" if self.scores == "logits" else self.scores)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
