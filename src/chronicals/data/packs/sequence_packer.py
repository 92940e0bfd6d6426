"""Packing of tokenised rows into rows of one length, for other training loops."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chronicals.data.packs.packing import plan_packs

logger = logging.getLogger(__name__)


class SequencePacker:
    """Packs tokenised rows into rows of exactly ``max_seq_length`` tokens.

    Args:
        max_seq_length: width of a packed row; longer documents are cut there, counted and warned
            about.
        padding_token_id: fills the tail of a row.
    """

    PADDING = -1
    """``sequence_ids`` of positions that hold no document; documents count from 0 in each row."""

    def __init__(self, max_seq_length: int, padding_token_id: int = 0):
        if max_seq_length < 1:
            raise ValueError(f"max_seq_length={max_seq_length}: must be at least 1")
        self.max_seq_length = max_seq_length
        self.padding_token_id = padding_token_id
        self.original_tokens = 0
        self.packed_tokens = 0
        self.truncated_documents = 0

    @property
    def efficiency(self) -> float:
        """Documents' tokens as a share of the positions in the packed rows of the last ``pack``."""
        return self.original_tokens / self.packed_tokens if self.packed_tokens else 0.0

    def pack(self, dataset: Iterable[Mapping[str, Any]]) -> list[dict[str, list[int]]]:
        """Return packed rows, each ``max_seq_length`` long.

        They have ``input_ids``, ``labels``, ``position_ids`` and ``sequence_ids``.

        Args:
            dataset: rows with ``input_ids`` and optionally ``labels`` (aligned, not shifted, -100
                for what is not trained). The first label of every document becomes -100: nothing
                precedes it.

        Raises:
            ValueError: a row is empty, or its labels are not as long as its ids.
        """
        self.truncated_documents = 0
        ids = []
        labels = []
        for number, row in enumerate(dataset):
            tokens = list(row["input_ids"])
            marks = list(row.get("labels", row["input_ids"]))
            if not tokens or len(tokens) != len(marks):
                raise ValueError(
                    f"row {number}: {len(tokens)} input_ids and {len(marks)} labels; need equal, "
                    "non-zero counts"
                )
            self.truncated_documents += len(tokens) > self.max_seq_length
            ids.append(tokens[: self.max_seq_length])
            labels.append([-100, *marks[1 : self.max_seq_length]])
        if self.truncated_documents:
            logger.warning(
                "%d documents were cut at max_seq_length=%d",
                self.truncated_documents,
                self.max_seq_length,
            )
        plan = plan_packs([len(tokens) for tokens in ids], self.max_seq_length)
        self.original_tokens = plan.tokens
        self.packed_tokens = len(plan) * self.max_seq_length
        rows = []
        for pack in plan:
            documents = [(ids[number], labels[number]) for number in pack]
            rows.append(self._packed_row(documents))
        return rows

    def _packed_row(self, documents: list[tuple[list[int], list[int]]]) -> dict[str, list[int]]:
        """Return the row that holds ``documents``, ids and labels of each."""
        row: dict[str, list[int]] = {
            "input_ids": [],
            "labels": [],
            "position_ids": [],
            "sequence_ids": [],
        }
        for number, (tokens, marks) in enumerate(documents):
            row["input_ids"] += tokens
            row["labels"] += marks
            row["position_ids"] += range(len(tokens))
            row["sequence_ids"] += [number] * len(tokens)
        tail = self.max_seq_length - len(row["input_ids"])
        row["input_ids"] += [self.padding_token_id] * tail
        row["labels"] += [-100] * tail
        row["position_ids"] += range(tail)
        row["sequence_ids"] += [self.PADDING] * tail
        return row

    def create_attention_mask(
        self, sequence_ids: Tensor | Sequence[Sequence[int]], causal: bool = True
    ) -> Tensor:
        """Return a mask, bool ``[B, 1, S, S]``: True if the row's position may attend to the
        column's.

        A position attends to its own document, with ``causal`` no further than itself. Padding
        attends to itself only, so that no row of the softmax is empty; nothing attends to padding.

        Args:
            sequence_ids: ``[B, S]`` or ``[S]``, as ``pack`` gives them.
        """
        ids = torch.as_tensor(sequence_ids)
        if ids.ndim == 1:
            ids = ids[None]
        allowed = (ids[:, :, None] == ids[:, None, :]) & (ids != self.PADDING)[:, None, :]
        if causal:
            allowed = allowed.tril()
        return (allowed | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device))[:, None]
