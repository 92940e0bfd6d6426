"""From a token store to Batches: packs in a shuffled endless stream, divided over steps,
micro-batches and ranks.

The stream is a function of the seed: epoch e is the plan's packs in the order of generator (seed,
e). A position in it is the number of packs consumed by all ranks together. Step s takes
``batch_size × accumulation × ranks`` packs in a row, so its documents depend on that product alone;
which micro-batch and rank takes which of them is decided by their cost (``balancing``). Past the
last epoch the stream goes on with empty packs, which count nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, Context
from chronicals.config import ChronicalsConfig
from chronicals.data.making.documents import MISMATCHED_SIDE, UNJUDGED
from chronicals.data.making.opening import open_store
from chronicals.data.making.shared_prompts import SHARED_COLUMN
from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN, TokenStore
from chronicals.data.making.target_columns import TargetColumn
from chronicals.data.packs.assembly import (
    ENTRIES_FACT,
    ENTRY_SHARES,
    FILLER_DOCUMENT,
    MAX_SEQLEN_FACT,
    TRAINED_FACT,
    WIDTH_BUCKETS,
    PackedDocuments,
    StepSizes,
    assemble,
)
from chronicals.data.packs.balancing import balance
from chronicals.data.packs.dealing import Dealing, RankShare
from chronicals.data.packs.packing import PackPlan
from chronicals.data.packs.parts import IN_ORDER, SPLIT, plan_parts
from chronicals.data.packs.prefetch import prefetch
from chronicals.data.packs.prompt_keys import shared_keys
from chronicals.data.packs.steps import Counts, Step
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.sources import Source

logger = logging.getLogger(__name__)

PREFETCHED_STEPS = (2, 64)
PREFETCHED_BYTES = 1 << 26
"""Steps that are prefetched: so many as take 64 MiB, within these bounds."""

SUMS = ("targets", "tokens", "documents", "items", "first_targets")
COST = 5
"""Names of what is summed over the documents of each pack, ``first_targets`` over the first ones
of items alone; and the column behind them: what attention costs, Σ length² of documents that
stand behind no prompt."""

WEIGHT_COLUMN = "weight"
GROUP_SEGMENT = "group"
"""The column that becomes ``Batch.weights``, and the segment that numbers the items of a Batch."""

CALLS = 4
"""Calls that assemble the prefetched steps, each several of them. Between two calls the thread
needs the GIL, which it gets after ``sys.getswitchinterval()`` (5 ms) where others run Python:
longer than a small step takes."""


def plan_of(store: TokenStore, config: ChronicalsConfig) -> PackPlan:
    """The packs of one epoch, in as many parts as processes share them."""
    items = store.items
    parts = config.pack_parts or config.context_parallel
    widest = 1 if items is None else int(np.diff(items).max(initial=1))
    limit = config.max_documents if config.use_sequence_packing else widest * parts
    return plan_parts(
        store.lengths, config.max_seq_length, limit, config.packing_strategy, items, parts
    )


def filler_token(tokenizer: Any, embedding_rows: int) -> int:
    """The token that filler documents are made of: the tokenizer's padding token, or 0 where the
    model's embedding lacks it.
    """
    token = tokenizer.pad_token_id
    if token is None or 0 <= token < embedding_rows:
        return token or 0
    _say_filler(tokenizer.pad_token, token, embedding_rows)
    return 0


@functools.cache
def _say_filler(name: str, token: int, rows: int) -> None:
    logger.info(
        "padding token %r has id %d, the embedding %d rows: packs are filled with token 0 instead",
        name,
        token,
        rows,
    )


class BatchStream:
    """``Steps`` of deterministic Batches from a store; see the module's docstring. A state is a
    number of packs.

    Args:
        store: tokenised documents.
        config: widths, batch size, accumulation, packing, seed.
        padding_token_id: the token that filler documents are made of.
        epochs: passes after which only empty packs follow; None never ends.
        rank, ranks: this process and how many there are.
        shuffle: False keeps the plan's order (evaluation), as ``packing_strategy="in-order"``
            always does.
        pin: build into pinned memory, for copies that do not wait.
        plan: ``plan_of(store, config)`` where it was made before.
        context: the ranks to which each micro-batch is dealt; ``rank`` is then the same of all of
            them.

    Raises:
        ValueError: the parts of the plan's packs cannot be divided among the ranks that share them.
    """

    def __init__(
        self,
        store: TokenStore,
        config: ChronicalsConfig,
        padding_token_id: int = 0,
        epochs: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        shuffle: bool = True,
        pin: bool = False,
        plan: PackPlan | None = None,
        context: Context | None = None,
    ):
        self.in_order = config.packing_strategy == IN_ORDER
        self.store = store
        self.epochs = epochs
        self.shuffle = shuffle and not self.in_order
        self.pin = pin
        self.width = config.max_seq_length
        self.batch_size = config.batch_size
        self.accumulation = config.gradient_accumulation_steps
        self.rank = rank
        self.ranks = ranks
        self.seed = config.seed
        self.plan = plan_of(store, config) if plan is None else plan
        self._dealing = None if context is None else Dealing.of(self.plan, context)
        most_entries = self.batch_size * (self.plan.max_documents + WIDTH_BUCKETS)
        share = -(-most_entries // ENTRY_SHARES)
        self._sizes = StepSizes(
            self.accumulation, self.batch_size, self.width, share, padding_token_id
        )
        # The number after the last pack stands for an empty one.
        offsets = np.append(self.plan.offsets, self.plan.offsets[-1])
        self._documents = PackedDocuments(
            store.ids,
            store.trained,
            store.id_starts,
            store.trained_starts,
            store.lengths,
            store.before,
            self.plan.documents,
            offsets,
        )
        first = (
            np.ones(len(store), np.int64)
            if store.items is None
            else (store.columns[SIDE_COLUMN] == 0).astype(np.int64)
        )
        lengths = store.lengths
        attended = (store.lengths + store.before) ** 2 - store.before**2
        summed = store.targets, lengths, np.ones(len(store), np.int64), first, first * store.targets
        cost = (
            self._sum_in_packs(attended)
            if context is None
            else self._slowest(attended, context.count)
        )
        self._sums = np.stack([*(self._sum_in_packs(values) for values in summed), cost], axis=1)
        self._judged = None
        if LABEL_COLUMN in store.columns:
            self._judged = self._sum_in_packs(first * (store.columns[LABEL_COLUMN] == 1))
            mismatched = (store.columns[SIDE_COLUMN] == MISMATCHED_SIDE) & (
                store.columns[LABEL_COLUMN] != UNJUDGED
            )
            self._mismatched = self._sum_in_packs(mismatched.astype(np.int64))
        self._weights = None
        if WEIGHT_COLUMN in store.columns:
            self._weights = self._sum_in_packs(
                store.columns[WEIGHT_COLUMN].astype(np.float64) * store.targets
            )
        shared = SHARED_COLUMN in store.columns and bool((store.columns[SHARED_COLUMN] > 0).any())
        self._columns = {
            name: values
            for name, values in store.columns.items()
            if shared or name != SHARED_COLUMN
        }
        self._order = -1, np.zeros(0, np.int64)

    @property
    def packs_a_step(self) -> int:
        return self.batch_size * self.accumulation * self.ranks

    @property
    def steps_an_epoch(self) -> int:
        return -(-len(self.plan) // self.packs_a_step)

    @property
    def steps_in_all(self) -> int | None:
        """Steps until every epoch is consumed, None without end."""
        return self.left(None)

    def left(self, state: int | None) -> int | None:
        """Steps from ``state`` until every epoch is consumed, None without end."""
        if self.epochs is None:
            return None
        return max(0, -(-(len(self.plan) * self.epochs - (state or 0)) // self.packs_a_step))

    @property
    def data(self) -> str:
        return self.store.key

    @property
    def earlier_data(self) -> tuple[str, ...]:
        return self.store.earlier_keys

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the order in which documents come, which a state counts in; how many a step takes
        is not part of it.
        """
        order = hashlib.sha256(f"{self.shuffle} {self.seed}".encode())
        for column in (self.store.id_starts[self.plan.documents], self.plan.offsets):
            order.update(column.tobytes())
        return order.hexdigest()

    def epoch(self, state: int | None) -> float:
        """Passes over the data after so many packs."""
        return self._consumed(state or 0) / len(self.plan)

    def __len__(self) -> int:
        """Micro-batches of this rank in the epochs asked for (one if endless)."""
        return (self.steps_in_all or self.steps_an_epoch) * self.accumulation

    def __iter__(self) -> Iterator[Batch]:
        """This rank's Batches of the epochs asked for (one if endless)."""
        for step in self.steps(count=len(self) // self.accumulation):
            yield from step.batches

    def steps(self, state: int | None = None, count: int | None = None) -> Iterator[Step]:
        """Steps from ``state`` on, assembled by a thread before they are asked for; ends after
        ``count`` of them, if given.

        Args:
            state: packs consumed by all ranks before.

        Raises:
            DataError: a document cannot be read where the store says it is.
        """
        fewest, most = PREFETCHED_STEPS
        depth = min(max(PREFETCHED_BYTES // self._sizes.bytes, fewest), most)
        size = -(-depth // CALLS)
        position = state or 0
        end = sys.maxsize if count is None else position + count * self.packs_a_step
        starts = range(position, end, self.packs_a_step)
        tasks = (
            self._assembly(starts[first : first + size]) for first in range(0, len(starts), size)
        )
        with closing(prefetch(tasks, depth // size)) as assembled:
            for steps, unreadable in assembled:
                yield from steps
                if unreadable >= 0:
                    raise DataError(
                        f"{self.store.path}: document {unreadable} is not where the store says it "
                        "is; the file is damaged: "
                        "delete it, and it will be built again"
                    )

    def _assembly(self, positions: Sequence[int]) -> Callable[[], tuple[Iterator[Step], int]]:
        """What assembles the steps that begin at ``positions``; it returns them, and the
        document that it could not read, or -1."""
        packs = [self._packs_at(position) for position in positions]
        memory = Memory(
            self._sizes, len(packs), self.pin, self._columns, self.store.of_targets, self._dealing
        )
        mine = np.stack([self._balanced(step)[:, self.rank].ravel() for step in packs])
        counts = [self._counts(step) for step in packs]

        def run() -> tuple[Iterator[Step], int]:
            built, unreadable = memory.assemble(mine, self._documents)
            ends = [self._consumed(position + self.packs_a_step) for position in positions]
            return map(Step, memory.batches(built), counts, positions, ends), unreadable

        return run

    def _consumed(self, position: int) -> int:
        return position if self.epochs is None else min(position, len(self.plan) * self.epochs)

    def packs_of(self, position: int) -> list[np.ndarray]:
        """The documents of each pack of the step that begins at ``position``, of all ranks, by
        their number in the store.
        """
        packed = self._documents.packed
        offsets = self._documents.offsets
        return [packed[offsets[pack] : offsets[pack + 1]] for pack in self._packs_at(position)]

    def _packs_at(self, position: int) -> np.ndarray:
        """Packs of the step that begins at ``position``, by their number in the plan, empty ones
        past the last epoch.
        """
        packs = np.full(self.packs_a_step, len(self.plan), np.int64)
        taken = 0
        while taken < self.packs_a_step:
            epoch, index = divmod(position + taken, len(self.plan))
            if self.epochs is not None and epoch >= self.epochs:
                break
            piece = self._order_of(epoch)[index : index + self.packs_a_step - taken]
            packs[taken : taken + len(piece)] = piece
            taken += len(piece)
        return packs

    def _order_of(self, epoch: int) -> np.ndarray:
        known, order = self._order
        if known != epoch:
            order = np.arange(len(self.plan))
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch]).permutation(order)
            self._order = epoch, order
        return order

    def _balanced(self, packs: np.ndarray) -> np.ndarray:
        """``[accumulation, ranks, batch_size]``: the packs of a step, micro-batches and ranks
        balanced by cost, or as they come where documents keep their order."""
        if self.in_order:
            return packs.reshape(self.accumulation, self.ranks, self.batch_size)
        return packs[
            balance(self._sums[packs, COST], self.accumulation, self.ranks, self.batch_size)
        ]

    def _counts(self, packs: np.ndarray) -> Counts:
        counts = dict(zip(SUMS, self._sums[packs].sum(0).tolist()))
        counts |= {
            "packs": int((packs < len(self.plan)).sum()),
            "slots": self.packs_a_step * self.width,
        }
        if self._judged is not None:
            counts["good_items"] = int(self._judged[packs].sum())
            counts["bad_items"] = counts["items"] - counts["good_items"]
            counts["mismatched_items"] = int(self._mismatched[packs].sum())
        return (
            counts
            if self._weights is None
            else {**counts, "weight": float(self._weights[packs].sum())}
        )

    def _sum_in_packs(self, values: np.ndarray) -> np.ndarray:
        """``[packs + 1]``: sums over the documents of each pack of what each document has; the
        last pack is the empty one.
        """
        running = np.concatenate(
            [np.zeros(1, values.dtype), np.cumsum(values[self._documents.packed])]
        )
        return np.diff(running[self._documents.offsets])

    def _slowest(self, values: np.ndarray, ranks: int) -> np.ndarray:
        """``[packs + 1]``: as ``_sum_in_packs``, of the rank that has the most of each pack, as
        if all had so much.
        """
        assert self._dealing is not None
        rank_of = self._dealing.rank_of[:-1]
        split = self._sum_in_packs(np.where(rank_of == SPLIT, values, 0))
        whole = [self._sum_in_packs(np.where(rank_of == rank, values, 0)) for rank in range(ranks)]
        return split + ranks * np.max(whole, axis=0)


class Memory:
    """What several steps are assembled in; their Batches are views of it, so it lives until the
    last of them is dropped.

    Operations of torch give the GIL away, which another thread may then keep for 5 ms; those of
    numpy do not. So pinned memory alone is torch's: it must know which copies to the card still
    read from it.
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
        of_columns = (steps, sizes.batches, 3, sizes.tokens)
        of_bounds = (steps, sizes.batches, sizes.bounds)
        self.columns: Any
        self.bounds: Any
        if pin:
            self.columns = torch.empty(of_columns, dtype=torch.int64, pin_memory=True)
            self.bounds = torch.empty(of_bounds, dtype=torch.int32, pin_memory=True)
        else:
            self.columns = np.empty(of_columns, np.int64)
            self.bounds = np.empty(of_bounds, np.int32)
        self.held = np.empty((steps, sizes.batches, sizes.bounds), np.int64)
        self.facts = np.zeros((steps, sizes.batches, 3), np.int64)

    def assemble(self, packs: np.ndarray, documents: PackedDocuments) -> tuple[int, int]:
        """As ``assembly.assemble``."""
        columns = np.asarray(self.columns)
        bounds = np.asarray(self.bounds)
        return assemble(columns, bounds, self.held, packs, self.facts, documents, self.sizes)

    def batches(self, steps: int) -> Iterator[list[Batch]]:
        """The Batches of each of the first ``steps``, once they are assembled."""
        for columns, bounds, held, facts in zip(
            self.columns[:steps], self.bounds, self.held, self.facts.tolist()
        ):
            yield [
                self._batch(*of_batch) if self.dealing is None else self._dealt(*of_batch)
                for of_batch in zip(columns, bounds, held, facts)
            ]

    def _batch(self, columns: Any, bounds: Any, held: np.ndarray, fact: list[int]) -> Batch:
        """All of a micro-batch."""
        (ids, targets, positions) = columns
        numbers = held[: fact[ENTRIES_FACT]]
        ends = bounds[: fact[ENTRIES_FACT] + 1]
        return Batch(
            torch.as_tensor(ids),
            torch.as_tensor(targets),
            torch.as_tensor(positions),
            torch.as_tensor(ends),
            max_seqlen=fact[MAX_SEQLEN_FACT],
            trained=fact[TRAINED_FACT],
            tokens=self._of_tokens(numbers, np.asarray(targets)),
            **self._of_documents(numbers, np.asarray(ends)),
        )

    def _dealt(self, columns: Any, bounds: Any, held: np.ndarray, fact: list[int]) -> Batch:
        """This rank's share of it."""
        assert self.dealing is not None
        (ids, targets, positions) = np.asarray(columns)
        numbers = held[: fact[ENTRIES_FACT]]
        share = self.dealing.share(
            numbers, np.asarray(bounds[: fact[ENTRIES_FACT] + 1]), self.sizes.share
        )
        own = np.where(share.documents >= 0, numbers[share.documents], FILLER_DOCUMENT)
        trained = share.of_rows(targets, IGNORED)
        return Batch(
            self._tensor(share.of_rows(ids, self.sizes.filler)),
            self._tensor(trained),
            self._tensor(share.of_rows(positions, 0) + share.positions),
            self._tensor(share.bounds),
            max_seqlen=share.longest,
            trained=int((trained != IGNORED).sum()),
            tokens=self._of_tokens(numbers, targets, share),
            split=None if share.split is None else share.split.map(self._pinned),
            **self._of_documents(own, share.bounds),
        )

    def _of_tokens(
        self, numbers: np.ndarray, targets: np.ndarray, share: RankShare | None = None
    ) -> dict[str, Tensor]:
        """Further columns of a Batch with these documents and targets, or of a share of it."""
        documents = numbers[numbers >= 0]
        laid = {
            name: column.laid(documents, targets != IGNORED)
            for name, column in self.of_targets.items()
        }
        return {
            name: self._tensor(column if share is None else share.of_rows(column, 0))
            for name, column in laid.items()
        }

    def _of_documents(self, numbers: np.ndarray, bounds: np.ndarray) -> dict[str, Any]:
        """``weights`` and ``segments`` of a Batch with these documents, none where the store has
        no further columns.
        """
        if not self.of_documents:
            return {}
        there = numbers >= 0
        segments = {
            name: np.where(there, values[numbers], FILLER_DOCUMENT).astype(values.dtype)
            for name, values in self.of_documents.items()
        }
        weights = segments.pop(WEIGHT_COLUMN, None)
        shared = segments.pop(SHARED_COLUMN, None)
        first = segments[SIDE_COLUMN] == 0 if SIDE_COLUMN in segments else there
        segments[GROUP_SEGMENT] = np.where(there, np.cumsum(first) - 1, FILLER_DOCUMENT)
        found: dict[str, Any] = {
            "segments": {name: self._tensor(values) for name, values in segments.items()}
        }
        if shared is not None:
            found["keys"] = shared_keys(
                np.where(there, shared, 0), segments[SIDE_COLUMN], bounds, self.sizes.width
            ).map(self._pinned)
        if weights is None:
            return found
        return {
            **found,
            "weights": self._tensor(np.repeat(weights, np.diff(bounds)).astype(np.float32)),
        }

    def _tensor(self, values: np.ndarray) -> Tensor:
        return self._pinned(torch.as_tensor(values))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.pin else tensor


def create_dataloader(dataset: Source, tokenizer: Any, config: ChronicalsConfig) -> BatchStream:
    """Batches of a data set: tokenised into a store, checked, packed, prefetched.

    Args:
        dataset: files, folders, hub names or rows in memory, as ``read_records`` takes them.
        tokenizer: a transformers tokenizer.
        config: widths, sizes, seed; ``num_epochs`` passes are made (one by default).

    Returns:
        An iterable of ``Batch`` with a length.

    Raises:
        DataError: training on it would be wrong; the message names the rules, the rows and the
            remedies.
    """
    store = open_store(dataset, tokenizer, config)
    return BatchStream(store, config, tokenizer.pad_token_id or 0, epochs=config.num_epochs or 1)
