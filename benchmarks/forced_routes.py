"""Routes of decode steps of which a known share of the experts is missing, and predictions of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chronicals.moe.offload.prediction import Predictor

HOT = 8
"""Experts of a layer that a forced route takes again and again: so few that the slots keep them."""


def hot_of(experts: int) -> int:
    """Return how many of a layer's experts are taken again and again: those of the least numbers."""
    return min(HOT, experts // 4)


def routes(layers: int, experts: int, each: int, missing: float, steps: int) -> Tensor:
    """Return the experts of each step and layer, int64 ``[steps, layers, k]``.

    Args:
        layers, experts, each: numbers of layers, of experts, and of experts of a token.
        missing: share of the experts of a token that are taken in turn, the others are ``HOT``.
        steps: number of steps.
    """
    hot = hot_of(experts)
    cold = experts - hot
    table = torch.empty(steps, layers, each, dtype=torch.int64)
    taken = [0] * layers
    warm = [0] * layers
    share = missing * each
    for number in range(steps * layers):
        step, layer = divmod(number, layers)
        cold_ones = int(share * (number + 1)) - int(share * number)
        chosen = []
        for _ in range(cold_ones):
            chosen.append(hot + taken[layer] % cold)
            taken[layer] += 1
        for _ in range(each - cold_ones):
            chosen.append(warm[layer] % hot)
            warm[layer] += 1
        table[step, layer] = torch.tensor(chosen)
    return table


class ForcedPrediction(Predictor):
    """Names the experts of the next layer's forced routes, of which a known share is wrong.

    The first layer of a step follows no other one, so its experts are not named. All names are drawn
    beforehand, and the device is not asked.

    Args:
        table: the routes, int64 ``[steps, layers, k]``.
        experts: number of experts.
        recall: share of the missing experts that are named. In the place of each of the others
            stands one that is not chosen, whose turn is half a round away.
    """

    def __init__(self, table: Tensor, experts: int, recall: float):
        super().__init__()
        hot = hot_of(experts)
        cold = experts - hot
        generator = torch.Generator().manual_seed(4)
        is_named = torch.rand(table.shape, generator=generator) < recall
        wrong = hot + (table - hot + cold // 2) % cold
        named = torch.where(is_named | (table < hot), table, wrong)
        self.position = 0
        self._named: list[list[list[int]]] = named.tolist()
        self._chosen: list[list[list[int]]] = table.sort(-1).values.tolist()

    def expected(self, layer: int, told: Sequence[int]) -> list[int]:
        """Return the names of a decode step; none in a pass of other routes, such as a prompt's."""
        step = self.position % len(self._named)
        if self.last(layer - 1) != self._chosen[step][layer - 1]:
            return []
        if layer == len(self._named[step]):
            self.position += 1
            return []
        return self._named[step][layer]


class ForcedRoutes:
    """Routes that a decode step takes, whatever the hidden states are.

    Of the experts of a layer ``HOT`` are taken again and again, the others in turn, so that they left
    their slots before their next turn. Rows of one pass take the same experts: an engine may pad
    its rows. Passes of prompts keep the routes of the router.

    Args:
        model: the model, whose gates are replaced.
        table: the routes, int64 ``[steps, layers, k]``; they begin anew behind the last step.
        device: of the model.
        prediction: what follows the routes on the host; None for nothing.
    """

    MOST_ROWS = 64
    """Rows of a decode step."""

    def __init__(
        self,
        model: Any,
        table: Tensor,
        device: str,
        prediction: ForcedPrediction | None = None,
    ):
        gates = [layer.mlp.gate for layer in model.model.layers]
        self.table_NLk = table.to(device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.prediction = prediction
        self.experts = model.config.num_experts
        for number, gate in enumerate(gates):
            gate.forward = partial(self.route, number, gate.forward, number == len(gates) - 1)

    def begin_anew(self) -> None:
        """Let the next decode step take the first routes."""
        self.position.zero_()
        if self.prediction is not None:
            self.prediction.position = 0

    def route(self, layer: int, own: Callable[..., Any], is_last: bool, x: Tensor) -> Any:
        """Return logits, shares and experts of the rows, as the class's router does."""
        rows = x.shape[:-1].numel()
        if rows > self.MOST_ROWS:
            return own(x)
        chosen = self.table_NLk[self.position % len(self.table_NLk), layer].expand(rows, -1)
        shares = torch.full(chosen.shape, 1 / chosen.shape[1], dtype=x.dtype, device=x.device)
        logits = torch.zeros(rows, self.experts, dtype=x.dtype, device=x.device)
        if is_last:
            self.position += 1
        return logits, shares, chosen.contiguous()
