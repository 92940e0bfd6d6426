"""The losses and metrics of routers as terms of a run, whatever its objective.

Every term is a mean over a pack, summed over the packs of a Batch, to be divided by those of the step: it depends neither on
``batch_size`` and accumulation nor on the number of processes.
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
from chronicals.moe.router_losses import Tokens
from chronicals.moe.router_settings import RouterSettings

PER = "packs"


@dataclass(frozen=True)
class RouterTerms:
    """An ``Addition``: the losses that ``settings`` have a weight for, with what is shown of the routers.

    Attributes:
        k: experts of a token.
    """

    settings: RouterSettings
    k: int

    @property
    def lookahead(self) -> bool:
        return self.settings.lookahead

    def terms(self, model: PresentedModel, computed: Computed, batch: Batch) -> Terms:
        tokens, given, layers = Tokens.of(batch, model.pack_width), self.settings, computed.router_logits
        found = dict[str, Term]()

        def add(name: str, weight: float, of_layer: Callable[[Tensor], Tensor]) -> None:
            if weight:
                found[f"router/{name}"] = Term(losses.mean([of_layer(logits) for logits in layers]), weight, PER)

        add("balance", given.balance, lambda x: losses.balance(x, self.k, tokens))
        add("z", given.z, lambda x: tokens.sum_over_packs(losses.z_losses(x), tokens.counted))
        add("temporal", given.temporal, lambda x: tokens.sum_over_packs(losses.temporal_losses(x), tokens.before(1)))
        add("locality", given.locality, lambda x: tokens.sum_over_packs(losses.locality_losses(x, self.k), tokens.before(1)))
        if given.layer_ahead:
            found |= self._lookahead("layer_ahead", given.layer_ahead, layer_predictions(computed), tokens)
        if given.token_ahead:
            found |= self._lookahead("token_ahead", given.token_ahead, token_predictions(computed), tokens)
        return {**found, **self._metrics([logits.detach() for logits in layers], tokens)}

    def _lookahead(self, name: str, weight: float, pairs: Any, tokens: Tokens) -> dict[str, Term]:
        """The loss of heads, and as a metric the recall of each distance."""
        given, sums, recalled = self.settings, list[Tensor](), dict[int, list[Tensor]]()
        for distance, shift, predicted, target in pairs:
            there = tokens.before(shift)
            values = losses.lookahead_losses(
                predicted, target, self.k, given.lookahead_temperature, given.lookahead_ranking, given.lookahead_set,
                given.lookahead_margin,
            )  # fmt: skip
            sums.append(tokens.sum_over_packs(values, there))
            share = losses.recalls(predicted.detach(), target.detach(), self.k)
            recalled.setdefault(distance, []).append(tokens.sum_over_packs(share, there))
        metrics = {f"router/{name}_recall_{d}": Term(losses.mean(shares), 0.0, PER) for d, shares in recalled.items()}
        return {f"router/{name}": Term(losses.mean(sums), weight, PER), **metrics}

    def _metrics(self, layers: list[Tensor], tokens: Tokens) -> dict[str, Term]:
        """``busiest``: the load of the expert with most tokens, in equal shares (1 is balance), the mean over layers;
        ``idle``: which share of the experts got no token; ``entropy`` of a token's probabilities, in nats; ``dropped``: which
        share of the choices no expert got."""
        busiest, idle, entropy, dropped = [], [], [], []
        for logits in layers:
            load_PE, _ = losses.load_and_mean(logits, self.k, tokens)
            there_P = tokens.counted.view(-1, tokens.width).any(1).float()
            busiest.append(logits.shape[-1] * load_PE.amax(1).sum())
            idle.append(((load_PE == 0).float().mean(1) * there_P).sum())
            log_p = losses.wide(logits).log_softmax(-1)
            entropy.append(tokens.sum_over_packs(-(log_p.exp() * log_p).sum(-1), tokens.counted))
            sent_T = losses.chosen(logits, self.k).sum(-1, dtype=torch.float32)
            dropped.append(tokens.sum_over_packs(1 - sent_T / self.k, tokens.counted))
        shown = {"busiest": busiest, "idle": idle, "entropy": entropy, "dropped": dropped}
        return {f"router/{name}": Term(losses.mean(values), 0.0, PER) for name, values in shown.items()}


def layer_predictions(computed: Computed) -> list[tuple[int, int, Tensor, Tensor]]:
    """Distance in layers, distance in tokens (0), prediction and target ``[T, E]``, of each layer and distance."""
    return [
        (d, 0, predicted[:, d], computed.router_logits[layer + d])
        for layer, predicted in enumerate(computed.layers_ahead)
        for d in range(predicted.shape[1])
    ]


def token_predictions(computed: Computed) -> list[tuple[int, int, Tensor, Tensor]]:
    """Distance in tokens, twice, prediction and target ``[T - distance, E]``, of each distance and layer."""
    ahead = computed.tokens_ahead
    assert ahead is not None
    return [
        (k, k, ahead[: len(ahead) - k, k - 1, layer], logits[k:])
        for k in range(1, ahead.shape[1] + 1)
        for layer, logits in enumerate(computed.router_logits)
    ]
