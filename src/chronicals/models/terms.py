"""The sums from which losses and metrics are computed, and the terms that a run adds to a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from chronicals.batch import Batch

if TYPE_CHECKING:
    from chronicals.models.presentation import PresentedModel


@dataclass(frozen=True)
class Term:
    """One part of a loss, or a metric: ``sum`` divided by a count over the whole optimizer step.

    Attributes:
        sum: scalar on the device, over one Batch.
        coefficient: weight in the loss; 0 for a metric, which is only logged.
        per: name of the count that divides the sum, such as ``targets``, ``weight`` or ``packs``.
    """

    sum: Tensor
    coefficient: float = 1.0
    per: str = "targets"


Terms = Mapping[str, Term]


@dataclass(frozen=True)
class Computed:
    """Outputs of one forward pass over the T tokens of a Batch.

    Attributes:
        states: hidden states ``[T, D]``, or logits ``[T, V]``; zero for tokens that are not
            computed, as in all other fields.
        router_logits: ``[T, E]`` per layer with routed experts; empty unless requested.
        layers_ahead: ``[T, n, E]`` per such layer: predicted router logits of the layer itself and
            of n - 1 later layers.
        tokens_ahead: ``[T, K, L, E]``: predicted router logits of all L layers for the tokens t + 1
            … t + K, or None.
        received: int64 ``[T, k]`` per module of ``PresentedModel.experts``: ids of the experts that
            process each token. An id outside 0 … E - 1 means no expert.
    """

    states: Tensor
    router_logits: Sequence[Tensor] = ()
    layers_ahead: Sequence[Tensor] = ()
    tokens_ahead: Tensor | None = None
    received: Sequence[Tensor] = ()


class AdditionalTerm(Protocol):
    """An additional loss term of a run, as listed in ``PresentedModel.additions``."""

    @property
    def lookahead(self) -> bool:
        """True if the term needs the model's predictions of its router logits."""

    def terms(self, model: PresentedModel, computed: Computed, batch: Batch) -> Terms:
        """Return terms and metrics by name. Called only while gradients are computed."""
