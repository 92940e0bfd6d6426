"""Additions: terms that any objective's loss has beside its own, made of what a model computes
beside its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from chronicals.batch import Batch
from chronicals.models.terms import Terms

if TYPE_CHECKING:
    from chronicals.models.presentation import PresentedModel


@dataclass(frozen=True)
class Computed:
    """What a forward pass over T tokens of a Batch gave; zero for tokens that are not computed.

    Attributes:
        states: ``[T, D]``, or logits ``[T, V]``.
        router_logits: ``[T, E]`` of each layer with routed experts, where they were asked for.
        layers_ahead: ``[T, n, E]`` of each such layer: the logits that it predicts of itself and of
            n - 1 later layers.
        tokens_ahead: ``[T, K, L, E]``: those that are predicted of all layers for the tokens t + 1
            … t + K.
        received: int64 ``[T, k]`` of each layer of ``PresentedModel.experts``: the experts that
            tokens really got; ids that no expert has stand for none.
    """

    states: Tensor
    router_logits: Sequence[Tensor] = ()
    layers_ahead: Sequence[Tensor] = ()
    tokens_ahead: Tensor | None = None
    received: Sequence[Tensor] = ()


class Addition(Protocol):
    """Of the losses of a run; held by ``PresentedModel.additions``."""

    @property
    def lookahead(self) -> bool:
        """Whether it needs what the model predicts of its routers."""

    def terms(self, model: PresentedModel, computed: Computed, batch: Batch) -> Terms:
        """Terms and metrics by names of its own. Called where gradients are computed."""
