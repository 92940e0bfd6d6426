"""Router losses and metrics as terms of a training run, independent of its objective.

Every term is a mean over a pack, summed over the packs of a Batch. The caller divides it by the
number of packs in the step. So it depends neither on ``batch_size`` and accumulation nor on the
number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.models import Computed, PresentedModel, Term, Terms
from chronicals.moe import router_losses as losses
from chronicals.moe.router_losses import Load, Tokens
from chronicals.moe.router_settings import RouterSettings

PER = "packs"


@dataclass(frozen=True)
class Routing:
    """Properties of a model's routers."""

    k: int
    experts: int
    scores: str | None = "softmax"
    logits: bool = True


@dataclass(frozen=True)
class RouterTerms:
    """An ``Addition`` to the loss: every router loss with a coefficient in ``settings``, and
    metrics.
    """

    settings: RouterSettings
    routing: Routing

    @property
    def lookahead(self) -> bool:
        return self.settings.lookahead

    def terms(self, model: PresentedModel, computed: Computed, batch: Batch) -> Terms:
        tokens = Tokens.of(batch, model.pack_width)
        given = self.settings
        received = computed.received
        load = Load.of(received, self.routing.experts, self.routing.k, tokens)
        logits = computed.router_logits if self.routing.logits else []
        found = dict[str, Term]()

        def add(name: str, weight: float, of_layer: Callable[..., Tensor], *layers: Any) -> None:
            if weight:
                values = [of_layer(*layer) for layer in zip(*layers, strict=True)]
                found[f"router/{name}"] = Term(losses.mean(values), weight, PER)

        def over_tokens(of_layer: Callable[..., Tensor], ahead: int) -> Callable[..., Tensor]:
            return lambda *layer: tokens.sum_over_packs(of_layer(*layer), tokens.before(ahead))

        def scored(of_layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda z, *others: of_layer(
                losses.log_scores(z, self.routing.scores or ""), *others
            )

        add(
            "balance",
            given.balance,
            scored(lambda x, f: losses.balance(x, f, tokens)),
            logits,
            load.shares_LPE,
        )
        add("z", given.z, over_tokens(losses.z_losses, 0), logits)
        add("temporal", given.temporal, over_tokens(scored(losses.temporal_losses), 1), logits)
        add(
            "locality",
            given.locality,
            over_tokens(scored(losses.locality_losses), 1),
            logits,
            received,
        )
        if given.layer_ahead:
            found |= self._lookahead(
                "layer_ahead", given.layer_ahead, layer_predictions(computed), tokens
            )
        if given.token_ahead:
            found |= self._lookahead(
                "token_ahead", given.token_ahead, token_predictions(computed), tokens
            )
        entropies = (
            [scored(losses.entropies)(z.detach()) for z in logits] if self.routing.scores else []
        )
        return {**found, **_metrics(load, entropies, tokens)}

    def _lookahead(self, name: str, weight: float, pairs: Any, tokens: Tokens) -> dict[str, Term]:
        """Return the loss of the heads ``name``, and their recall at each distance as metrics."""
        given = self.settings
        sums = list[Tensor]()
        recalled = dict[int, list[Tensor]]()
        for distance, shift, predicted, target in pairs:
            there = tokens.before(shift)
            values = losses.lookahead_losses(
                predicted,
                target,
                self.routing.k,
                given.lookahead_temperature,
                given.lookahead_ranking,
                given.lookahead_set,
                given.lookahead_margin,
            )
            sums.append(tokens.sum_over_packs(values, there))
            share = losses.recalls(predicted.detach(), target.detach(), self.routing.k)
            recalled.setdefault(distance, []).append(tokens.sum_over_packs(share, there))
        metrics = {
            f"router/{name}_recall_{d}": Term(losses.mean(shares), 0.0, PER)
            for d, shares in recalled.items()
        }
        return {f"router/{name}": Term(losses.mean(sums), weight, PER), **metrics}


def _metrics(load: Load, entropies: list[Tensor], tokens: Tokens) -> dict[str, Term]:
    """Return the load and entropy metrics of the routers.

    ``busiest`` is the load of the busiest expert in units of an equal share (1 is balanced).
    ``idle`` is the share of the experts that received no token. ``dropped`` is the share of the
    choices that no expert received. ``entropy`` is that of P in nats, if P is known.

    Each is a mean over layers; with the suffix ``_worst`` it is that of the worst layer of a pack.
    """
    there_P = (load.choices_P1[:, 0] > 0).float()
    shown = {
        "busiest": load.rows_LPE.shape[-1] * load.shares_LPE.amax(-1),
        "idle": (load.rows_LPE == 0).float().mean(-1) * there_P,
        "dropped": load.dropped_LP,
    }
    worst = {name: values_LP.amax(0) for name, values_LP in shown.items()}
    if entropies:
        shown["entropy"] = tokens.means(torch.stack(entropies), tokens.counted)
        worst["entropy"] = shown["entropy"].amin(0)
    found = {name: values_LP.mean(0) for name, values_LP in shown.items()}
    found |= {f"{name}_worst": values_P for name, values_P in worst.items()}
    return {f"router/{name}": Term(values_P.sum(), 0.0, PER) for name, values_P in found.items()}


def layer_predictions(computed: Computed) -> list[tuple[int, int, Tensor, Tensor]]:
    """Return the layer-ahead predictions with their targets.

    Returns:
        For each layer and distance: distance in layers, distance in tokens (0), prediction and
            target ``[T, E]``.
    """
    return [
        (d, 0, predicted[:, d], computed.router_logits[layer + d])
        for layer, predicted in enumerate(computed.layers_ahead)
        for d in range(predicted.shape[1])
    ]


def token_predictions(computed: Computed) -> list[tuple[int, int, Tensor, Tensor]]:
    """Return the token-ahead predictions with their targets.

    Returns:
        For each distance and layer: distance in tokens (twice), prediction and target ``[T -
            distance, E]``.
    """
    ahead = computed.tokens_ahead
    assert ahead is not None
    return [
        (k, k, ahead[: len(ahead) - k, k - 1, layer], logits[k:])
        for k in range(1, ahead.shape[1] + 1)
        for layer, logits in enumerate(computed.router_logits)
    ]
