"""Packs of answers: the answers of a step become packed Batches, in which they share their prompt.

A step takes as many micro-batches as its tokens need; all Batches have the same number of tokens,
and their numbers of documents have few values, so that graphs can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.making.documents import (
    MIN_SHARED_TOKENS,
    SHARED_COLUMN,
    DocumentPiece,
    FlatDocuments,
    share_prompt,
)
from chronicals.data.making.store import SIDE_COLUMN, TargetColumn
from chronicals.data.packs.assembly import (
    ENTRY_SHARES,
    WIDTH_BUCKETS,
    PackedDocuments,
    StepSizes,
)
from chronicals.data.packs.packing import PackPlan, plan_packs
from chronicals.data.packs.step_memory import StepMemory
from chronicals.data.packs.strategies import balanced_packs
from chronicals.objectives.policy_gradient import ADVANTAGE, AGE, ANSWER, REWARD


@dataclass(frozen=True)
class DrawnAnswer:
    """An answer that is trained on.

    Attributes:
        number: its number in the rollout.
        tokens: int32 ``[n]``.
        is_trained: False if it is masked out of the loss.
        reward, advantage: of the answer.
        of_tokens: float32 ``[n]`` by name, columns of its tokens.
    """

    number: int
    tokens: np.ndarray
    is_trained: bool
    reward: float
    advantage: float
    of_tokens: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class AnswerGroup:
    """A prompt with its answers.

    Attributes:
        prompt: int32, its tokens.
        answers: of the prompt.
    """

    prompt: np.ndarray
    answers: Sequence[DrawnAnswer]

    def items(self, width: int) -> Iterator[list[DrawnAnswer]]:
        """Yield the answers in items that fit in a pack of ``width`` tokens with the prompt once.

        A short prompt is not shared: each of its answers is an item.
        """
        before = len(self.prompt) - 1  # the last token predicts each answer's first
        if before < MIN_SHARED_TOKENS:
            yield from ([answer] for answer in self.answers)
            return
        item = list[DrawnAnswer]()
        taken = before
        for answer in self.answers:
            if item and taken + 1 + len(answer.tokens) > width:
                yield item
                item = []
                taken = before
            item.append(answer)
            taken += 1 + len(answer.tokens)
        if item:
            yield item

    def pieces(self, item: Sequence[DrawnAnswer]) -> list[DocumentPiece]:
        """Return the documents of an item: its answers, and their prompt behind them."""
        documents = []
        for side, answer in enumerate(item):
            ids = np.concatenate((self.prompt, answer.tokens)).astype(np.int32)
            trained = np.zeros(len(ids), np.uint8)
            trained[len(self.prompt) :] = answer.is_trained
            documents.append(DocumentPiece(0, side, ids, trained))
        return share_prompt(documents)


class AnswerPacks:
    """Makes the micro-batches of a rank from the answers of a step.

    Args:
        config: width, packs of a micro-batch, packing.
        padding_token_id: the token that filler documents are made of.
        rank, ranks: this process and how many there are.
        pin: build into pinned memory, for copies that do not wait.
    """

    def __init__(
        self,
        config: ChronicalsConfig,
        padding_token_id: int = 0,
        rank: int = 0,
        ranks: int = 1,
        pin: bool = False,
    ):
        self.config = config
        self.padding_token_id = padding_token_id
        self.rank = rank
        self.ranks = ranks
        self.pin = pin

    def batches(
        self, groups: Sequence[AnswerGroup], age: int
    ) -> tuple[list[Batch], dict[str, int | float]]:
        """Return this rank's Batches of a step, and the counts of the whole step.

        Args:
            groups: of the step, the same on all ranks.
            age: updates since the answers were drawn.
        """
        items = [
            (group, item) for group in groups for item in group.items(self.config.max_seq_length)
        ]
        pieces = list[DocumentPiece]()
        answers = list[DrawnAnswer | None]()
        for group, item in items:
            documents = group.pieces(item)
            pieces += documents
            answers += [*item, *[None] * (len(documents) - len(item))]
        flat = FlatDocuments.joined(pieces)
        plan = self._plan(flat)
        columns = self._columns(flat, answers, age)
        of_targets = self._of_targets(flat, answers)
        batches = self._assembled(flat, plan, columns, of_targets)
        return batches, self._counts(flat, plan, answers, age)

    def _plan(self, flat: FlatDocuments) -> PackPlan:
        """Return the packs of a step."""
        config = self.config
        starts = np.append(np.flatnonzero(flat.sides == 0), len(flat))
        limit = config.max_documents
        if not config.use_sequence_packing:
            limit = int(np.diff(starts).max())
        return plan_packs(
            flat.lengths, config.max_seq_length, limit, config.packing_strategy, starts
        )

    def _micro_batches(self, plan: PackPlan) -> int:
        """Return the micro-batches of a rank that the packs of a step need."""
        return max(-(-len(plan) // (self.config.batch_size * self.ranks)), 1)

    def _assembled(
        self,
        flat: FlatDocuments,
        plan: PackPlan,
        columns: Mapping[str, np.ndarray],
        of_targets: Mapping[str, TargetColumn],
    ) -> list[Batch]:
        """Return this rank's Batches of the packs."""
        size = self.config.batch_size
        count = self._micro_batches(plan)
        # The next power of two: few numbers of entries occur in a run.
        documents = 1 << max(plan.max_documents - 1, 0).bit_length()
        entries = size * (documents + WIDTH_BUCKETS)
        share = -(-entries // ENTRY_SHARES)
        sizes = StepSizes(count, size, self.config.max_seq_length, share, self.padding_token_id)
        packed = PackedDocuments(
            flat.ids,
            flat.trained,
            flat.offsets[:-1],
            flat.offsets[:-1],
            flat.lengths,
            np.maximum(flat.shared, 0),
            plan.documents,
            np.append(plan.offsets, plan.offsets[-1]),  # the last pack is empty
        )
        packs = np.full(count * self.ranks * size, len(plan), np.int64)
        packs[: len(plan)] = np.arange(len(plan))
        attended = (flat.lengths + packed.before) ** 2 - packed.before**2
        costs = np.zeros(len(plan) + 1, np.int64)
        costs[:-1] = np.add.reduceat(attended[plan.documents], plan.offsets[:-1])
        places = balanced_packs(costs[packs], count, self.ranks, size)
        own = packs[places[:, self.rank].ravel()]
        memory = StepMemory(sizes, 1, self.pin, columns, of_targets)
        _, unreadable = memory.assemble(own[None], packed)
        assert unreadable < 0
        return next(memory.batches(1))

    def _columns(
        self, flat: FlatDocuments, answers: Sequence[DrawnAnswer | None], age: int
    ) -> dict[str, np.ndarray]:
        """Return the columns of the documents."""
        columns = {
            SIDE_COLUMN: flat.sides,
            ADVANTAGE: np.array([one.advantage if one else 0.0 for one in answers], np.float32),
            REWARD: np.array([one.reward if one else 0.0 for one in answers], np.float32),
            ANSWER: np.array([one.number if one else -1 for one in answers], np.int64),
            AGE: np.full(len(flat), age, np.int64),
        }
        if (flat.shared > 0).any():
            columns[SHARED_COLUMN] = flat.shared
        return columns

    def _of_targets(
        self, flat: FlatDocuments, answers: Sequence[DrawnAnswer | None]
    ) -> dict[str, TargetColumn]:
        """Return the columns of the trained tokens."""
        trained = [one for one in answers if one is not None and one.is_trained]
        names = next((one.of_tokens for one in answers if one is not None), {})
        return {
            name: TargetColumn.of(
                np.concatenate(
                    [np.zeros(0, np.float32), *(one.of_tokens[name] for one in trained)]
                ),
                flat.targets,
            )
            for name in names
        }

    def _counts(
        self,
        flat: FlatDocuments,
        plan: PackPlan,
        answers: Sequence[DrawnAnswer | None],
        age: int,
    ) -> dict[str, int | float]:
        """Return the counts of the whole step, by the names of ``steps.StepCounts``."""
        targets = int(flat.targets.sum())
        packs = self._micro_batches(plan) * self.ranks * self.config.batch_size
        first = flat.sides == 0
        return {
            "targets": targets,
            "tokens": len(flat.ids),
            "documents": len(flat),
            "items": int(first.sum()),
            "first_targets": int(flat.targets[first].sum()),
            "packs": len(plan),
            "slots": packs * self.config.max_seq_length,
            "answers": sum(one is not None for one in answers),
            "new_targets": 0 if age else targets,
        }
