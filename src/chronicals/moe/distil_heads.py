"""Heads for a frozen mixture, distilled from what its routers do.

    loss = mean over layers, distances and tokens of the lookahead loss (``router_losses.py``), of the layer-ahead heads and of
    the token-ahead head

The model runs once over each token; its weights are neither trained nor changed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.moe import router_losses as losses
from chronicals.moe.predictor import ExpertPredictor, HeadSizes
from chronicals.moe.recall import Recalls, measure
from chronicals.moe.recording import Recorded, record_data
from chronicals.moe.routers import experts_per_token
from chronicals.optimizers import learning_rate_factor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distillation:
    """Settings.

    Attributes:
        learning_rate: peak, of AdamW; it falls to 0 by a cosine.
        passes: over the recordings, where they can be gone through again.
        rows: tokens of a step.
        temperature, ranking, of_set, margin: of the lookahead loss.
    """

    learning_rate: float = 3e-3
    passes: int = 1
    rows: int = 4096
    temperature: float = 1.0
    ranking: float = 0.1
    of_set: float = 1.0
    margin: float = 1.0


def distil(predictor: ExpertPredictor, recordings: Iterable[Recorded], k: int, steps: int, how: Distillation) -> list[float]:
    """Train the heads of ``predictor``; the recordings have features.

    Args:
        steps: how many there will be, for the schedule; fewer recordings end it earlier.

    Returns:
        The loss of each step.

    Raises:
        ValueError: there is nothing to train on, or a loss is not a number.
    """
    heads = [p for module in (predictor.layer_ahead, predictor.token_ahead) if module is not None for p in module.parameters()]
    optimizer = torch.optim.AdamW(heads, lr=how.learning_rate, weight_decay=0.0)
    found = list[Tensor]()
    for recorded in recordings:
        for part in _rows(recorded, how.rows):
            factor = learning_rate_factor("cosine", min(len(found), steps - 1), steps, max(1, steps // 20), 0.0, 0.2)
            for group in optimizer.param_groups:
                group["lr"] = how.learning_rate * factor
            loss = head_loss(predictor, part, k, how)
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


def head_loss(predictor: ExpertPredictor, recorded: Recorded, k: int, how: Distillation) -> Tensor:
    """Of all heads on recordings with features."""
    options = k, how.temperature, how.ranking, how.of_set, how.margin
    assert recorded.features is not None
    parts = list[Tensor]()
    for layer, features in enumerate(recorded.features):
        predicted = predictor.layers(layer, features)
        for d in range(predicted.shape[1]):
            parts.append(losses.lookahead_losses(predicted[:, d], recorded.logits[layer + d], *options).mean())
    total = torch.stack(parts).mean()
    if predictor.token_ahead is None:
        return total
    assert recorded.hidden is not None and recorded.embeddings is not None
    ahead, parts = predictor.tokens(recorded.hidden[:-1], recorded.embeddings[1:]), []
    for distance in range(1, ahead.shape[1] + 1):
        there = recorded.follows(distance).float()
        for layer in range(ahead.shape[2]):
            found = ahead[: len(recorded) - distance, distance - 1, layer]
            values = losses.lookahead_losses(found, recorded.logits[layer, distance:], *options)
            parts.append((values * there).sum() / there.sum().clamp(min=1.0))
    return total + torch.stack(parts).mean()


def _rows(recorded: Recorded, most: int) -> Iterator[Recorded]:
    """So many tokens at a time."""
    assert recorded.features is not None and recorded.hidden is not None and recorded.embeddings is not None
    for first in range(0, len(recorded), most):
        part = slice(first, first + most)
        bounds = (recorded.documents - first).clamp(0, min(most, len(recorded) - first)).unique()
        if len(recorded.token_ids[part]) < 2:
            continue
        yield Recorded(
            recorded.token_ids[part], bounds, recorded.experts[:, part], recorded.weights[:, part], recorded.logits[:, part],
            recorded.features[:, part], recorded.hidden[part], recorded.embeddings[part],
        )  # fmt: skip


def checksum(model: Any) -> str:
    """sha256 of all parameters and buffers by name, hexadecimal."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class TrainedPredictor:
    """Attributes:
    losses: of the steps.
    recalls: on held-out tokens.
    tokens: that were trained on.
    unchanged: the checksum of the model, before and after.
    """

    predictor: ExpertPredictor
    losses: list[float]
    recalls: Recalls
    tokens: int
    model: str
    unchanged: str

    def about(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "model": self.model, "model_sha256": self.unchanged, "trained_on_tokens": self.tokens,
            "first_loss": self.losses[0], "last_loss": sum(self.losses[-10:]) / len(self.losses[-10:]),
            "recalls": self.recalls.to_dict(),
        }  # fmt: skip


def train_predictor(
    model: Any, tokenizer: Any, data: Any, held_out: Any, config: ChronicalsConfig, sizes: HeadSizes, how: Distillation,
    tokens: int, held_out_tokens: int,
) -> TrainedPredictor:  # fmt: skip
    """Heads for ``model``, trained as it runs over ``data`` and measured on ``held_out``.

    Args:
        held_out: data; None keeps the first ``held_out_tokens`` of ``data`` for that.
        tokens: to train on, at most.

    Raises:
        ValueError: the model is no mixture that is known here, there is too little data, or the model was changed.
    """
    predictor = ExpertPredictor.beside(model, sizes)
    before, k = checksum(model), experts_per_token(model)
    recordings = record_data(model, tokenizer, data, config, True, tokens + (held_out_tokens if held_out is None else 0))
    if held_out is None:
        kept = list(_until(recordings, held_out_tokens))
    else:
        kept = list(record_data(model, tokenizer, held_out, config, True, held_out_tokens))
    steps = max(1, tokens // min(how.rows, config.batch_size * config.max_seq_length))
    counted = _Counted(recordings)
    found = distil(predictor, counted, k, steps, how)
    recalls = measure(predictor, kept, k)
    if (after := checksum(model)) != before:
        raise ValueError(f"{type(model).__name__}: its weights changed from {before[:8]} to {after[:8]}, and they must not")
    return TrainedPredictor(predictor, found, recalls, counted.tokens, str(model.config._name_or_path), before)


class _Counted:
    """Recordings, whose tokens are counted as they go by."""

    def __init__(self, recordings: Iterable[Recorded]):
        self.recordings, self.tokens = recordings, 0

    def __iter__(self) -> Iterator[Recorded]:
        for recorded in self.recordings:
            self.tokens += len(recorded)
            yield recorded


def _until(recordings: Iterator[Recorded], tokens: int) -> Iterator[Recorded]:
    seen = 0
    while seen < tokens and (recorded := next(recordings, None)) is not None:
        seen += len(recorded)
        yield recorded
