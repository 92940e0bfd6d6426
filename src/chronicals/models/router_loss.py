"""The load-balancing loss of a mixture-of-experts class.

    loss = E · Σ_e f_e · p_e

f_e is how often a token of a layer is sent to expert e of E. p_e is the mean of the softmax of its
router logits. Both are means over all layers and over the tokens of a batch. These are equations 4
to 6 of Fedus et al., 2022, with the k experts of a token instead of one. The class adds the loss
times its own coefficient to the cross-entropy, if the configuration has
``output_router_logits=True``.

Here every pack is such a batch, and the loss of a step is the mean over its packs. It therefore
does not depend on ``batch_size``, accumulation or the number of processes. Tokens of documents
without a target, such as padding, do not count. Tokens of a prompt that several answers share count
once for each answer.

Shapes: L layers, T tokens, P packs of W tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, document_at
from chronicals.models.terms import Term

ROUTER_LOSS = "router_loss"
"""Name of the auxiliary term."""

COUNTED = "counted"
"""Name of a Batch segment: a mask of the documents that count, if they have a target.

Without it all documents with a target count.
"""

SWITCH = "output_router_logits"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the coefficient in classes and configurations."""


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a class; see the module's docstring.

    Attributes:
        coefficient: its factor in the total loss.
        experts_per_token: k.
    """

    coefficient: float
    experts_per_token: int

    def term(self, logits: Sequence[Tensor], batch: Batch, width: int | None) -> Term:
        """Return the loss of a Batch as a term, to be divided by the number of packs in the step.

        Args:
            logits: ``[T, E]`` per layer.
            batch: T tokens.
            width: tokens of a pack; None if the Batch is one pack.
        """
        return Term(
            self.sum_over_packs(logits, times_trained(batch), width or len(batch)),
            self.coefficient,
            "packs",
        )

    def sum_over_packs(self, logits: Sequence[Tensor], counted: Tensor, width: int) -> Tensor:
        """Return the fp32 sum of the losses of all packs, without the coefficient.

        A pack without tokens that count adds zero.

        Args:
            logits: ``[T, E]`` per layer.
            counted: ``[T]``, how many times each token counts.
            width: W.
        """
        counted_PW = counted.view(-1, width).float()
        f_PE = p_PE = torch.zeros((), device=counted.device)
        for layer in logits:
            p_PWE = layer.float().unflatten(0, (-1, width)).softmax(-1)
            sent_PWE = torch.zeros_like(p_PWE).scatter(
                -1, p_PWE.topk(self.experts_per_token).indices, 1.0
            )
            f_PE = f_PE + torch.einsum("pwe,pw->pe", sent_PWE, counted_PW)
            p_PE = p_PE + torch.einsum("pwe,pw->pe", p_PWE, counted_PW)
        rows_P1 = (len(logits) * counted_PW.sum(1, keepdim=True)).clamp(min=1.0)
        return logits[0].shape[-1] * (f_PE / rows_P1 * (p_PE / rows_P1)).sum()


def times_trained(batch: Batch) -> Tensor:
    """Return fp32 ``[T]``: in how many counted documents each token occurs.

    A token of a shared prompt occurs in the document of each answer to it.
    """
    bounds = batch.cu_seqlens
    document = document_at(torch.arange(len(batch), device=bounds.device), bounds)
    targets = torch.zeros(len(bounds), dtype=torch.int32, device=bounds.device)
    counts = targets.index_add(0, document, (batch.targets != IGNORED).int()) > 0
    if COUNTED in batch.segments:
        counts[:-1] &= batch.segments[COUNTED]
    if batch.keys is None:
        return counts[document].float()
    places = batch.keys.places
    return (
        ((places >= 0) & counts[document_at(places.clamp(min=0), batch.keys.cu_seqlens)])
        .sum(0)
        .float()
    )


def asks_for_router_loss(model: Any) -> bool:
    """Return True if the configuration asks for a router loss with a nonzero coefficient."""
    asked = getattr(model.config, SWITCH, None) or getattr(
        model.config.get_text_config(), SWITCH, None
    )
    return bool(asked and any(_own(model, name) for name in COEFFICIENTS))


def read_router_loss(model: Any) -> RouterLoss:
    """Return the router loss with the model's coefficient and experts per token.

    ``proved_router_loss`` checks that the class computes this loss.
    """
    coefficients = [_own(model, name) for name in COEFFICIENTS]
    coefficient = next(value for value in coefficients if value)
    return RouterLoss(float(coefficient), int(_own(model, "num_experts_per_tok") or 0))


def _own(model: Any, name: str) -> Any:
    """Return a field of the model if it has it, else that of its text configuration, else None."""
    return getattr(model, name, getattr(model.config.get_text_config(), name, None))
