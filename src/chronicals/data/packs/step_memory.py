"""Memory in which the Batches of several steps are assembled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, SharedKeys
from chronicals.data.making.documents import IS_SHARED, SHARED_COLUMN
from chronicals.data.making.store import SIDE_COLUMN, TargetColumn
from chronicals.data.packs.assembly import (
    ENTRIES_FACT,
    ENTRY_SHARES,
    FILLER_DOCUMENT,
    MAX_SEQLEN_FACT,
    TRAINED_FACT,
    PackedDocuments,
    StepSizes,
    assemble,
    width_bucket,
)
from chronicals.data.packs.dealing import Dealing, RankShare, rank_share

WEIGHT_COLUMN = "weight"
"""The column of a store that becomes ``Batch.weights``."""

GROUP_SEGMENT = "group"
"""The segment of a Batch that numbers its items."""

KEY_SHARES = 16
"""The number of keys is rounded up to a multiple of 1 / ``KEY_SHARES`` of a Batch's tokens.

Few numbers then occur.
"""


class StepMemory:
    """Arrays in which several steps are assembled.

    Their Batches are views of the arrays, so these live until the last Batch is dropped.

    Operations of torch release the GIL, which another thread may then keep for 5 ms; those of numpy
    do not. So only pinned memory is torch's, which must know the copies to the card that still read
    from it.

    Args:
        sizes: of a step.
        steps: how many there are.
        pin: use pinned memory, for copies that do not wait.
        columns: values of documents by name, which become segments and weights.
        of_targets: values of targets by name.
        dealing: who has which document, if several ranks share a micro-batch.
    """

    def __init__(
        self,
        sizes: StepSizes,
        steps: int,
        pin: bool,
        columns: Mapping[str, np.ndarray] | None = None,
        of_targets: Mapping[str, TargetColumn] | None = None,
        dealing: Dealing | None = None,
    ):
        self.dealing = dealing
        self.sizes = sizes
        self.pin = pin
        self.of_documents = columns or {}
        self.of_targets = of_targets or {}
        column_shape = (steps, sizes.batches, 3, sizes.packs * sizes.width)
        bound_shape = (steps, sizes.batches, ENTRY_SHARES * sizes.share + 1)
        self.columns: Any
        self.bounds: Any
        if pin:
            self.columns = torch.empty(column_shape, dtype=torch.int64, pin_memory=True)
            self.bounds = torch.empty(bound_shape, dtype=torch.int32, pin_memory=True)
        else:
            self.columns = np.empty(column_shape, np.int64)
            self.bounds = np.empty(bound_shape, np.int32)
        self.numbers = np.empty(bound_shape, np.int64)
        self.facts = np.zeros((steps, sizes.batches, 3), np.int64)

    def assemble(self, packs: np.ndarray, documents: PackedDocuments) -> tuple[int, int]:
        """Write the steps, as ``assembly.assemble`` does, and return what it returns."""
        columns = np.asarray(self.columns)
        bounds = np.asarray(self.bounds)
        return assemble(columns, bounds, self.numbers, packs, self.facts, documents, self.sizes)

    def batches(self, steps: int) -> Iterator[list[Batch]]:
        """Yield the Batches of each of the first ``steps``, once they are assembled."""
        make = self._batch if self.dealing is None else self._dealt
        for columns, bounds, numbers, facts in zip(
            self.columns[:steps], self.bounds, self.numbers, self.facts.tolist()
        ):
            yield [make(*of_batch) for of_batch in zip(columns, bounds, numbers, facts)]

    def _batch(self, columns: Any, bounds: Any, numbers: np.ndarray, facts: list[int]) -> Batch:
        """Return the whole of a micro-batch."""
        ids, targets, positions = columns
        numbers = numbers[: facts[ENTRIES_FACT]]
        bounds = bounds[: facts[ENTRIES_FACT] + 1]
        return Batch(
            torch.as_tensor(ids),
            torch.as_tensor(targets),
            torch.as_tensor(positions),
            torch.as_tensor(bounds),
            max_seqlen=facts[MAX_SEQLEN_FACT],
            trained=facts[TRAINED_FACT],
            tokens=self._of_tokens(numbers, np.asarray(targets)),
            **self._of_documents(numbers, np.asarray(bounds)),
        )

    def _dealt(self, columns: Any, bounds: Any, numbers: np.ndarray, facts: list[int]) -> Batch:
        """Return this rank's share of a micro-batch."""
        assert self.dealing is not None
        ids, targets, positions = np.asarray(columns)
        numbers = numbers[: facts[ENTRIES_FACT]]
        bounds = np.asarray(bounds[: facts[ENTRIES_FACT] + 1])
        ranks = self.dealing.rank_of[numbers]
        share = rank_share(bounds, ranks, self.dealing.context, self.sizes.share)
        documents = share.documents
        own_numbers = np.where(documents >= 0, numbers[documents], FILLER_DOCUMENT)
        own_targets = share.of_rows(targets, IGNORED)
        return Batch(
            self._tensor(share.of_rows(ids, self.sizes.filler)),
            self._tensor(own_targets),
            self._tensor(share.of_rows(positions, 0) + share.positions),
            self._tensor(share.bounds),
            max_seqlen=share.longest,
            trained=int((own_targets != IGNORED).sum()),
            tokens=self._of_tokens(numbers, targets, share),
            split=None if share.split is None else share.split.map(self._tensor),
            **self._of_documents(own_numbers, share.bounds),
        )

    def _of_tokens(
        self, numbers: np.ndarray, targets: np.ndarray, share: RankShare | None = None
    ) -> dict[str, Tensor]:
        """Return the further columns of tokens of a Batch, or of a share of it.

        Args:
            numbers: of the documents of the whole micro-batch.
            targets: of the whole micro-batch.
            share: this rank's, if several ranks share the micro-batch.
        """
        documents = numbers[numbers >= 0]
        tensors = {}
        for name, of_targets in self.of_targets.items():
            column = of_targets.laid(documents, targets != IGNORED)
            if share is not None:
                column = share.of_rows(column, 0)
            tensors[name] = self._tensor(column)
        return tensors

    def _of_documents(self, numbers: np.ndarray, bounds: np.ndarray) -> dict[str, Any]:
        """Return ``segments``, ``weights`` and ``keys`` of a Batch with these documents.

        None of them is there if the store has no further columns.
        """
        if not self.of_documents:
            return {}
        is_document = numbers >= 0
        segments = {
            name: np.where(is_document, values[numbers], FILLER_DOCUMENT).astype(values.dtype)
            for name, values in self.of_documents.items()
        }
        weights = segments.pop(WEIGHT_COLUMN, None)
        shared = segments.pop(SHARED_COLUMN, None)
        first = segments[SIDE_COLUMN] == 0 if SIDE_COLUMN in segments else is_document
        segments[GROUP_SEGMENT] = np.where(is_document, np.cumsum(first) - 1, FILLER_DOCUMENT)
        fields: dict[str, Any] = {
            "segments": {name: self._tensor(values) for name, values in segments.items()}
        }
        if shared is not None:
            before = np.where(is_document, shared, 0)
            keys = shared_keys(before, segments[SIDE_COLUMN], bounds, self.sizes.width)
            fields["keys"] = keys.map(self._tensor)
        if weights is not None:
            of_tokens = np.repeat(weights, np.diff(bounds)).astype(np.float32)
            fields["weights"] = self._tensor(of_tokens)
        return fields

    def _tensor(self, values: np.ndarray | Tensor) -> Tensor:
        tensor = torch.as_tensor(values)
        return tensor.pin_memory() if self.pin else tensor


def shared_keys(
    shared: np.ndarray, sides: np.ndarray, bounds: np.ndarray, width: int
) -> SharedKeys:
    """Return the keys that the documents of a Batch attend to.

    The keys of a document are the tokens of its prompt, then its own.

    Args:
        shared: int64 ``[N]``, the column of each document, 0 for filler.
        sides: int64 ``[N]``, the place of each in its item.
        bounds: int32 ``[N + 1]``, of the documents.
        width: tokens of a pack.
    """
    starts = bounds[:-1].astype(np.int64)
    lengths = np.diff(bounds).astype(np.int64)
    tokens = int(bounds[-1])
    before = np.maximum(shared, 0)
    # The prompt of an item is the next one behind its answers.
    number = np.arange(len(shared))
    prompts = np.where(shared == IS_SHARED, number, len(shared) - 1)
    prompt_starts = starts[np.minimum.accumulate(prompts[::-1])[::-1]]
    # For each key: its document, and its place among the keys of that document.
    ends = np.append(0, np.cumsum(before + lengths))
    document = np.repeat(number, before + lengths)
    place = np.arange(ends[-1]) - ends[document]
    is_own = place >= before[document]
    own_tokens = starts[document] + place - before[document]
    index = np.where(is_own, own_tokens, prompt_starts[document] + place)
    # For each token: its key as a document's own (row 0), and as part of each answer's prompt.
    places = np.full((int(sides[before > 0].max(initial=-1)) + 2, tokens), -1, np.int64)
    row = np.where(is_own, 0, sides[document] + 1)
    places[row, index] = np.arange(len(index))
    share = -(-tokens // KEY_SHARES)
    filled = np.zeros(-(-len(index) // share) * share, np.int64)
    filled[: len(index)] = index
    return SharedKeys(
        torch.as_tensor(filled),
        torch.as_tensor(ends.astype(np.int32)),
        torch.as_tensor(places),
        width_bucket(int((before + lengths).max(initial=1)), width),
    )
