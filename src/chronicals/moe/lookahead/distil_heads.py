"""Train lookahead heads for a frozen mixture by distillation from its recorded routers.

    loss = mean of the head losses over layers, distances and tokens, of the layer-ahead heads
           + the same mean of the token-ahead head

A head predicts z′ for a router that had logits z and chose the experts S. With the scores s and the
values v of the model's class (``choosing.py``), its loss is

    KL(softmax(log s(z) / T) ‖ softmax(log s(z′) / T))
    + the ranking term and the set term of v(z′) over S

For routers that choose the largest logits and weigh experts by their softmax, this is the lookahead
loss of ``router_losses.py``. If groups limit the choice, the two terms compare only experts of kept
groups, and the same two terms are added for the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.moe import router_losses as losses
from chronicals.moe.lookahead.choosing import Choice
from chronicals.moe.lookahead.predictor import ExpertPredictor
from chronicals.moe.lookahead.recording import Recorded
from chronicals.optimizers import learning_rate_factor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadDistillation:
    """Settings of a distillation.

    Attributes:
        learning_rate: peak learning rate of AdamW; it falls to 0 along a cosine.
        passes: number of passes over a trace.
        rows: tokens per step.
        temperature, ranking, of_set, margin: parameters of the head loss.
        seed: seed of the new heads and of the order of the parts of a trace.
    """

    learning_rate: float = 3e-3
    passes: int = 1
    rows: int = 4096
    temperature: float = 1.0
    ranking: float = 0.1
    of_set: float = 1.0
    margin: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("passes", 1), ("rows", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")

    def steps_of(self, tokens: int) -> int:
        """Return the number of steps for ``tokens`` tokens; a last step of one token is skipped."""
        return -(-(tokens - 1) // self.rows) if tokens % self.rows == 1 else -(-tokens // self.rows)


def distil(
    predictor: ExpertPredictor, recordings: Iterable[Recorded], steps: int, how: HeadDistillation
) -> list[float]:
    """Train the heads of ``predictor`` on recordings with features.

    The recordings may be on another device than the heads.

    Args:
        predictor: the heads to train, in place.
        recordings: what routers did on documents, with features.
        steps: expected number of steps, for the schedule; fewer recordings end it earlier.
        how: settings of the distillation.

    Returns:
        The loss of each step.

    Raises:
        ValueError: there is no recording, or a loss is not finite.
    """
    heads = [
        p
        for module in (predictor.layer_ahead, predictor.token_ahead)
        if module is not None
        for p in module.parameters()
    ]
    optimizer = torch.optim.AdamW(heads, lr=how.learning_rate, weight_decay=0.0)
    found = list[Tensor]()
    for recorded in recordings:
        recorded = recorded.to(predictor.gates.device)
        for n in range(how.steps_of(len(recorded))):
            # warm-up over a twentieth of the steps, then a cosine to 0
            factor = learning_rate_factor(
                "cosine", min(len(found), steps - 1), steps, max(1, steps // 20), 0.0, 0.2
            )
            for group in optimizer.param_groups:
                group["lr"] = how.learning_rate * factor
            loss = head_loss(predictor, recorded.part(n * how.rows, how.rows), how)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(heads, 1.0)
            optimizer.step()
            found.append(loss.detach())
            if len(found) % 50 == 0:
                logger.info("heads: step %d of %d, loss %.4f", len(found), steps, float(found[-1]))
    if not found:
        raise ValueError("there is no recording to distil heads from; give more data")
    values = torch.stack(found).tolist()
    if not all(torch.isfinite(torch.tensor(values))):
        raise ValueError("the loss of the heads is not a number; lower learning_rate")
    return values


def head_loss(predictor: ExpertPredictor, recorded: Recorded, how: HeadDistillation) -> Tensor:
    """Return the loss of all heads on recordings with features."""

    def of(predicted: Tensor, layer: int, first: int = 0) -> Tensor:
        """Return the losses of predictions for layer ``layer`` and the tokens from ``first`` on."""
        target = recorded.logits[layer, first:]
        experts = recorded.experts[layer, first:]
        return prediction_losses(
            predictor.choice, predicted, target, experts, predictor.corrections[layer], how
        )

    assert recorded.features is not None
    parts = list[Tensor]()
    for layer, features in enumerate(recorded.features):
        predicted = predictor.layers(layer, features)
        parts += [of(predicted[:, d], layer + d).mean() for d in range(predicted.shape[1])]
    total = torch.stack(parts).mean()
    if predictor.token_ahead is None:
        return total
    assert recorded.hidden is not None and recorded.embeddings is not None
    ahead = predictor.tokens(recorded.hidden[:-1], recorded.embeddings[1:])
    parts = []
    for distance in range(1, ahead.shape[1] + 1):
        there = recorded.follows(distance).float()
        for layer in range(ahead.shape[2]):
            values = of(ahead[: len(recorded) - distance, distance - 1, layer], layer, distance)
            parts.append((values * there).sum() / there.sum().clamp(min=1.0))
    return total + torch.stack(parts).mean()


def prediction_losses(
    choice: Choice,
    predicted: Tensor,
    target: Tensor,
    experts: Tensor,
    correction: Tensor,
    how: HeadDistillation,
) -> Tensor:
    """Return the loss of each prediction, ``[T]``.

    Args:
        choice: the rule by which the router chooses.
        predicted: z′ ``[T, E]``.
        target: z ``[T, E]``.
        experts: int64 ``[T, k]``, the chosen experts.
        correction: ``[E]``, the router's score correction.
        how: settings of the distillation.
    """
    terms = how.temperature, how.ranking, how.of_set, how.margin
    found = losses.divergences(
        choice.log_scores(predicted), choice.log_scores(target), how.temperature
    )
    values = choice.values(predicted, correction)
    those = torch.zeros_like(values, dtype=torch.bool).scatter(-1, experts, True)
    if choice.groups == 1:
        return found + losses.set_losses(values, those, *terms)
    kept = choice.kept(choice.values(target, correction)) | those.unflatten(
        -1, (choice.groups, -1)
    ).any(-1)
    among = kept.repeat_interleave(values.shape[-1] // choice.groups, dim=-1)
    found = found + losses.set_losses(values, those, *terms, among=among)
    return found + losses.set_losses(choice.of_groups(values), kept, *terms)
