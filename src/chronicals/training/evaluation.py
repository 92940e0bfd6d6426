"""Held-out loss, perplexity and token accuracy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Source, filler_token, open_store
from chronicals.distributed import Ranks
from chronicals.models import PresentedModel, check_positions, in_evaluation, input_device, present
from chronicals.objectives import OBJECTIVES, Objective
from chronicals.training.precision import Precision
from chronicals.training.step import counts_of


@dataclass(frozen=True)
class Evaluation:
    """Means over every trained target of a data set.

    Attributes:
        loss: cross-entropy in nats; a mean by the weights of the targets where those have some.
        perplexity: its exponential.
        token_accuracy: share of targets that are the likeliest token.
        targets: how many there were.
    """

    loss: float
    perplexity: float
    token_accuracy: float
    targets: int

    def to_dict(self) -> dict:
        return asdict(self)


@torch.no_grad()
def evaluate(
    model: PresentedModel, objective: Objective, stream: BatchStream, precision: Precision, ranks: Ranks | None = None
) -> Evaluation:
    """Score every document of ``stream`` once, without dropout; the model's modules return to the modes they were in."""
    ranks = ranks or Ranks()
    sums = torch.zeros(2, device=precision.device, dtype=torch.float64)
    targets, weight = 0, 0.0
    with in_evaluation(model.model):
        for step in stream.steps(count=stream.steps_in_all):
            targets += step.counts.targets
            weight += float(counts_of(objective, step, ranks)["cross_entropy"])
            for batch in step.batches:
                with precision.autocast():
                    scores = objective.score(model, batch.to(precision.device, non_blocking=True))
                sums += torch.stack([scores["cross_entropy"], scores["correct"]]).double()
    cross_entropy, correct = ranks.sum(sums).tolist()
    loss, accuracy = cross_entropy / (weight or 1.0), correct / max(targets, 1)
    return Evaluation(loss, math.exp(min(loss, 700.0)), accuracy, targets)


def evaluate_data(model: Any, tokenizer: Any, data: Source, config: ChronicalsConfig) -> Evaluation:
    """Score data with a model as it is, through the path of training.

    Raises:
        DataError: it cannot be read, or nothing in it is trained.
        ValueError: the model has no positions for it, sees the tokens that it is to predict, or gives no finite loss.
    """
    embedding_rows = model.get_input_embeddings().weight.shape[0]
    store = open_store(data, tokenizer, config, embedding_rows=embedding_rows)
    check_positions(model, store.longest)
    stream = BatchStream(store, config, filler_token(tokenizer, embedding_rows), epochs=1, shuffle=False)
    device = input_device(model)
    presented = present(model, fused_head=config.use_fused_kernels, flash=config.use_flash_attention)
    with presented.attending_documents():
        score = evaluate(presented, OBJECTIVES[config.objective](), stream, Precision("fp32", device))
    if not math.isfinite(score.loss):
        raise ValueError(
            f"loss={score.loss}: what {type(model).__name__} predicts for this data is not finite; its weights are damaged or "
            "overflow: take an earlier checkpoint, or download it again"
        )
    return score
