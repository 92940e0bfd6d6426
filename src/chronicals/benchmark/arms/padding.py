"""A step's documents as micro-batches of padded rows, sorted by length to save padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chronicals.benchmark.work import Document

MICRO_BATCH_OVERHEAD = 2048
"""Positions that cost as much as one more micro-batch, unless a trial finds another number."""


@dataclass(frozen=True)
class PaddedStep:
    """A step as micro-batches of padded rows.

    Attributes:
        micro_batches: arguments of the model, each with the share of the step's targets that it
            holds.
        tokens: real tokens.
        slots: positions, padding included.
    """

    micro_batches: list[tuple[dict[str, Any], float]]
    tokens: int
    slots: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Rows and width of each micro-batch."""
        return [tuple(arguments["input_ids"].shape) for arguments, _ in self.micro_batches]


def padded(
    documents: Sequence[Document],
    rows: int,
    place: torch.device,
    overhead: int = MICRO_BATCH_OVERHEAD,
) -> PaddedStep:
    """Return the documents sorted by length, in micro-batches of at most ``rows`` rows, padded on
    the right.

    Sums over the step do not depend on the order. A batch without padding has no mask, so that
    attention can take its causal path.

    Args:
        overhead: positions of padding that cost as much as one more micro-batch.
    """
    ordered = sorted(documents, key=len, reverse=True)
    lengths = [len(document) for document in ordered]
    groups = [ordered[start:end] for start, end in grouped(lengths, rows, overhead)]
    targets = [
        sum(int((document.labels[1:] != -100).sum()) for document in group) for group in groups
    ]
    micro_batches = []
    slots = 0
    for group, group_targets in zip(groups, targets):
        width = len(group[0])
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for row, document in enumerate(group):
            ids[row, : len(document)] = torch.from_numpy(np.asarray(document.ids, np.int64))
            labels[row, : len(document)] = torch.from_numpy(np.asarray(document.labels, np.int64))
            mask[row, : len(document)] = 1
        arguments = {"input_ids": ids, "labels": labels}
        if not bool(mask.all()):
            arguments["attention_mask"] = mask
        placed = {name: x.to(place) for name, x in arguments.items()}
        micro_batches.append((placed, group_targets / sum(targets)))
        slots += ids.numel()
    return PaddedStep(micro_batches, sum(lengths), slots)


def grouped(lengths: Sequence[int], rows: int, overhead: int) -> list[tuple[int, int]]:
    """Return the bounds of the consecutive groups, of at most ``rows`` each, that have the fewest
    positions plus ``overhead`` for each group.

    Args:
        lengths: of sorted documents, the longest first.
    """
    costs = [0.0]
    starts = [0]
    for end in range(1, len(lengths) + 1):
        candidates = []
        for start in range(max(0, end - rows), end):
            count = end - start
            # The last term makes groups even where costs are equal.
            cost = costs[start] + overhead + count * lengths[start] + 1e-6 * count**2
            candidates.append((cost, -start))
        cost, negated_start = min(candidates)
        costs.append(cost)
        starts.append(-negated_start)
    bounds = []
    end = len(lengths)
    while end:
        bounds.append((starts[end], end))
        end = starts[end]
    return bounds[::-1]
