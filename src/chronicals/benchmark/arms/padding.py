"""A step's documents as micro-batches of padded rows, sorted by length so that little is
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.benchmark.work import Document

OVERHEAD = 2048
"""Positions that cost as much as one more micro-batch, where no trial says otherwise."""

TRIED = (512, OVERHEAD, 8192)
"""Overheads between which a padded peer chooses by a trial: many small micro-batches, or few
with more padding.
"""


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
        return [tuple(given["input_ids"].shape) for given, _ in self.micro_batches]


def padded(
    documents: Sequence[Document], rows: int, place: torch.device, overhead: int = OVERHEAD
) -> PaddedStep:
    """``documents`` sorted by length, in micro-batches of at most ``rows`` rows, padded on the
    right.

    The sums over the step are the same in any order. A batch without padding has no mask, so that
    attention may take its causal path.

    Args:
        overhead: how many positions of padding are better than one more micro-batch.
    """
    ordered = sorted(documents, key=len, reverse=True)
    groups = [
        ordered[start:end]
        for start, end in grouped([len(document) for document in ordered], rows, overhead)
    ]
    targets = [
        sum(int((document.labels[1:] != -100).sum()) for document in group) for group in groups
    ]
    micro_batches = []
    slots = 0
    for group, held in zip(groups, targets):
        width = len(group[0])
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for row, document in enumerate(group):
            ids[row, : len(document)] = torch.from_numpy(np.asarray(document.ids, np.int64))
            labels[row, : len(document)] = torch.from_numpy(np.asarray(document.labels, np.int64))
            mask[row, : len(document)] = 1
        given = {"input_ids": ids, "labels": labels} | (
            {} if bool(mask.all()) else {"attention_mask": mask}
        )
        micro_batches.append(
            ({name: x.to(place) for name, x in given.items()}, held / sum(targets))
        )
        slots += ids.numel()
    return PaddedStep(micro_batches, sum(len(document) for document in documents), slots)


def packed(documents: Sequence[Document], place: torch.device) -> PaddedStep:
    """``documents`` one after the other in a single row, for an attention that keeps apart what
    ``position_ids`` begin anew.
    """
    ids = torch.from_numpy(
        np.concatenate([np.asarray(document.ids, np.int64) for document in documents])
    )
    labels = torch.from_numpy(
        np.concatenate([np.asarray(document.labels, np.int64) for document in documents])
    )
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    labels[positions == 0] = -100
    given = {
        name: x[None].to(place)
        for name, x in {"input_ids": ids, "labels": labels, "position_ids": positions}.items()
    }
    return PaddedStep([(given | flash_lengths(given["position_ids"]), 1.0)], len(ids), len(ids))


def flash_lengths(position_ids: Tensor) -> dict[str, Any]:
    """Where packed documents begin and how long the longest is, as transformers' flash attention
    takes them.

    Without them it looks for them in each layer anew, and hands the longest on as a tensor, which
    FlashAttention-4 refuses.

    Args:
        position_ids: of a packed row, [1, length]; each document begins anew at 0.
    """
    flat = position_ids.flatten()
    ends = torch.tensor([len(flat)], dtype=torch.int32, device=flat.device)
    bounds = torch.cat([(flat == 0).nonzero().flatten().to(torch.int32), ends])
    longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def grouped(lengths: Sequence[int], rows: int, overhead: int) -> list[tuple[int, int]]:
    """Bounds of the consecutive groups, of at most ``rows`` each, with the least positions and
    ``overhead`` for each group.

    Args:
        lengths: of sorted documents, the longest first.
    """
    costs = [0.0]
    starts = [0]
    for end in range(1, len(lengths) + 1):
        cost, start = min(
            (
                costs[start]
                + overhead
                + (end - start) * lengths[start]
                + 1e-6 * (end - start) ** 2,
                -start,
            )  # even, where equal
            for start in range(max(0, end - rows), end)
        )
        costs.append(cost)
        starts.append(-start)
    bounds = []
    end = len(lengths)
    while end:
        bounds.append((starts[end], end))
        end = starts[end]
    return bounds[::-1]
