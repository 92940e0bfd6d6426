"""Recall of expert predictions: the share of the chosen experts that were predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chronicals.moe.lookahead.predictor import ExpertPredictor
from chronicals.moe.lookahead.recording import Recorded


@dataclass
class Recalls:
    """Mean recalls over the tokens of recordings.

    Attributes:
        k: experts per token.
        layer_ahead, layer_ahead_2k: recall among the first k and 2k experts that heads predict, by
            layer and distance.
        gate_reuse: the same among the first k that gate reuse predicts.
        token_ahead: by distance in tokens and layer; empty without such a head.
        tokens: number of tokens measured.
    """

    k: int
    layer_ahead: list[list[float]] = field(default_factory=list)
    layer_ahead_2k: list[list[float]] = field(default_factory=list)
    gate_reuse: list[list[float]] = field(default_factory=list)
    token_ahead: list[list[float]] = field(default_factory=list)
    tokens: int = 0

    def at(self, distance: int, name: str = "layer_ahead") -> list[float]:
        """Return the recalls at ``distance``, one for each layer that predicts so far ahead."""
        return [row[distance] for row in getattr(self, name) if len(row) > distance]

    def mean(self, distance: int, name: str = "layer_ahead") -> float:
        found = self.at(distance, name)
        return sum(found) / len(found)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@torch.no_grad()
def measure(predictor: ExpertPredictor, recordings: Iterable[Recorded], k: int) -> Recalls:
    """Measure the recalls of ``predictor`` on recordings with features.

    Raises:
        ValueError: the recordings hold no token.
    """
    sums = dict[tuple[str, int, int], Tensor]()
    counts = dict[tuple[str, int, int], int]()
    tokens = 0

    def add(key: tuple[str, int, int], hit: Tensor) -> None:
        sums[key] = sums.get(key, torch.zeros((), device=hit.device)) + hit.sum()
        counts[key] = counts.get(key, 0) + len(hit)

    for recorded in recordings:
        tokens += len(recorded)
        recorded = recorded.to(predictor.gates.device)
        assert recorded.features is not None
        for layer, features in enumerate(recorded.features):
            heads = predictor.layers(layer, features)
            early = predictor.reuse(layer, features)
            for d in range(heads.shape[1]):
                aim = recorded.experts[layer + d]
                ours, theirs = (
                    predictor.order(layer + d, logits[:, d]) for logits in (heads, early)
                )
                add(("layer_ahead", layer, d), hits(ours, aim, k))
                add(("layer_ahead_2k", layer, d), hits(ours, aim, min(2 * k, heads.shape[-1])))
                add(("gate_reuse", layer, d), hits(theirs, aim, k))
        if predictor.token_ahead is not None:
            _of_tokens(predictor, recorded, k, add)
    if not tokens:
        raise ValueError("there is no token to measure predictions on; give more data")
    means = {key: float(total) / max(counts[key], 1) for key, total in sums.items()}
    return Recalls(
        k,
        **{name: _table(means, name) for name in sorted({name for name, _, _ in means})},
        tokens=tokens,
    )


def _of_tokens(predictor: ExpertPredictor, recorded: Recorded, k: int, add: Callable) -> None:
    assert recorded.hidden is not None and recorded.embeddings is not None
    ahead = predictor.tokens(recorded.hidden[:-1], recorded.embeddings[1:])
    for distance in range(1, ahead.shape[1] + 1):
        there = recorded.follows(distance)
        for layer in range(ahead.shape[2]):
            found = predictor.order(layer, ahead[: len(recorded) - distance, distance - 1, layer])
            add(
                ("token_ahead", distance - 1, layer),
                hits(found, recorded.experts[layer, distance:], k)[there],
            )


def hits(predicted: Tensor, experts: Tensor, among: int) -> Tensor:
    """Return the share of the chosen experts that are among the first ``among`` predicted, ``[T]``.

    Args:
        predicted: ``[T, E]``; the largest are predicted first.
        experts: int64 ``[T, k]``, the chosen experts.
    """
    first = predicted.topk(among, dim=-1).indices
    return (experts[..., None] == first[..., None, :]).any(-1).float().mean(-1)


def _table(means: dict[tuple[str, int, int], float], name: str) -> list[list[float]]:
    rows = sorted({row for found, row, _ in means if found == name})
    return [[means[key] for key in sorted(means) if key[:2] == (name, row)] for row in rows]
