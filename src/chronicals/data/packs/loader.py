"""Batches from a token store, whose packs are a shuffled endless stream.

It is divided over steps, micro-batches and ranks. The stream is a function of the seed: epoch e is
the plan's packs in the order of generator (seed, e). A position in it is the number of packs
consumed by all ranks together. Step s takes ``batch_size × accumulation × ranks`` packs in a row,
so its documents depend on that product alone. The cost of packs decides which micro-batch and rank
takes which of them. Micro-batches are sorted by cost, so that ranks that wait for each other hold
neighbours. After the last epoch the stream goes on with empty packs, which count nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import numpy as np

from chronicals.batch import Batch, Context
from chronicals.config import ChronicalsConfig
from chronicals.data.making.documents import MISMATCHED_SIDE, SHARED_COLUMN, UNJUDGED
from chronicals.data.making.opening import open_store
from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN, TokenStore
from chronicals.data.packs.assembly import (
    ENTRY_SHARES,
    WIDTH_BUCKETS,
    PackedDocuments,
    StepSizes,
)
from chronicals.data.packs.dealing import Dealing
from chronicals.data.packs.packing import PackPlan, plan_epoch
from chronicals.data.packs.step_memory import WEIGHT_COLUMN, StepMemory
from chronicals.data.packs.steps import Step
from chronicals.data.packs.strategies import IN_ORDER, SPLIT, balanced_packs
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.sources import RowSource
from chronicals.log_once import log_once

logger = logging.getLogger(__name__)

PREFETCHED_BYTES = 1 << 26
PREFETCHED_STEPS = (2, 64)
"""Memory of the prefetched steps in bytes, and the smallest and largest number of these steps."""

ASSEMBLY_CALLS = 4
"""Calls that assemble the prefetched steps, several steps each.

Between two calls the thread needs the GIL. If other threads run Python, it gets it after
``sys.getswitchinterval()`` (5 ms), which is longer than a small step takes.
"""

_SUMMED = ("targets", "tokens", "documents", "items", "first_targets")
"""Names of the sums; ``first_targets`` are those of the first documents of items."""

_Result = TypeVar("_Result")


def filler_token(tokenizer: Any, embedding_rows: int) -> int:
    """Return the token that filler documents are made of.

    It is the tokenizer's padding token, or 0 if the model's embedding lacks that one.
    """
    token = tokenizer.pad_token_id
    if token is None or 0 <= token < embedding_rows:
        return token or 0
    log_once(
        logger.info,
        f"padding token {tokenizer.pad_token!r} has id {token}, the embedding {embedding_rows} "
        "rows: packs are filled with token 0 instead",
    )
    return 0


class PackSums:
    """Sums by pack. The number after the last pack stands for an empty one.

    Args:
        store: the documents.
        documents: which pack holds which of them.
        dealing: who has which document, if several ranks share a pack.

    Attributes:
        costs: int64 ``[packs + 1]``, what attention costs: the sum of squared lengths of documents,
            without the square of the prompt that they stand behind. Of several ranks that share a
            pack it is the cost of the slowest, as if all had as much.
    """

    def __init__(self, store: TokenStore, documents: PackedDocuments, dealing: Dealing | None):
        self._packed = documents.packed
        self._offsets = documents.offsets
        each = np.ones(len(store), np.int64)
        first = each
        if store.items is not None:
            first = (store.columns[SIDE_COLUMN] == 0).astype(np.int64)
        values = store.targets, store.lengths, each, first, first * store.targets
        self._sums = np.stack([self._in_packs(column) for column in values], axis=1)
        attended = (store.lengths + store.before) ** 2 - store.before**2
        if dealing is None:
            self.costs = self._in_packs(attended)
        else:
            # The sum of the rank that has the most, times the ranks; all have the same of a split
            # document.
            rank_of = dealing.rank_of[:-1]
            count = dealing.context.count
            split = self._in_packs(np.where(rank_of == SPLIT, attended, 0))
            whole = [
                self._in_packs(np.where(rank_of == rank, attended, 0)) for rank in range(count)
            ]
            self.costs = split + count * np.max(whole, axis=0)
        self._good = None
        if LABEL_COLUMN in store.columns:
            labels = store.columns[LABEL_COLUMN]
            mismatched = (store.columns[SIDE_COLUMN] == MISMATCHED_SIDE) & (labels != UNJUDGED)
            self._good = self._in_packs(first * (labels == 1))
            self._mismatched = self._in_packs(mismatched.astype(np.int64))
        self._weights = None
        if WEIGHT_COLUMN in store.columns:
            weights = store.columns[WEIGHT_COLUMN].astype(np.float64)
            self._weights = self._in_packs(weights * store.targets)

    def counts(self, packs: np.ndarray, slots: int) -> dict[str, int | float]:
        """Return what a step holds, by the names of ``steps.StepCounts``.

        Args:
            packs: of the step, all ranks.
            slots: positions of the step.
        """
        counts: dict[str, int | float] = dict(zip(_SUMMED, self._sums[packs].sum(0).tolist()))
        counts["packs"] = int((packs < len(self._offsets) - 2).sum())
        counts["slots"] = slots
        if self._good is not None:
            counts["good_items"] = int(self._good[packs].sum())
            counts["bad_items"] = counts["items"] - counts["good_items"]
            counts["mismatched_items"] = int(self._mismatched[packs].sum())
        if self._weights is not None:
            counts["weight"] = float(self._weights[packs].sum())
        return counts

    def _in_packs(self, values: np.ndarray) -> np.ndarray:
        """Return ``[packs + 1]``, sums over the documents of each pack of a value of documents."""
        zero = np.zeros(1, values.dtype)
        running = np.concatenate([zero, np.cumsum(values[self._packed])])
        return np.diff(running[self._offsets])


class BatchStream:
    """``Steps`` of deterministic Batches from a store; see the module's docstring.

    A state is a number of packs.

    Attributes:
        data: the store's key.
        earlier_data: keys that earlier versions of this package gave to the same content.
        packs_a_step: packs that all ranks together take in a step.
        steps_an_epoch: steps that hold all packs once.

    Args:
        store: tokenised documents.
        config: widths, batch size, accumulation, packing, seed.
        padding_token_id: the token that filler documents are made of.
        epochs: passes after which only empty packs follow; None never ends.
        rank, ranks: this process and how many there are.
        shuffle: False keeps the plan's order (evaluation), as ``packing_strategy="in-order"``
            always does.
        pin: build into pinned memory, for copies that do not wait.
        plan: ``plan_epoch(store, config)`` if it was made before.
        context: the ranks to which each micro-batch is dealt; ``rank`` is then the same for all of
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
        self.data = store.key
        self.earlier_data = store.earlier_keys
        self.epochs = epochs
        self.shuffle = shuffle and not self.in_order
        self.pin = pin
        self.width = config.max_seq_length
        self.batch_size = config.batch_size
        self.accumulation = config.gradient_accumulation_steps
        self.rank = rank
        self.ranks = ranks
        self.seed = config.seed
        self.plan = plan_epoch(store, config) if plan is None else plan
        self.packs_a_step = self.batch_size * self.accumulation * ranks
        self.steps_an_epoch = -(-len(self.plan) // self.packs_a_step)
        self._end = sys.maxsize if epochs is None else len(self.plan) * epochs
        most_entries = self.batch_size * (self.plan.max_documents + WIDTH_BUCKETS)
        self._sizes = StepSizes(
            self.accumulation,
            self.batch_size,
            self.width,
            -(-most_entries // ENTRY_SHARES),
            padding_token_id,
        )
        self._documents = PackedDocuments(
            store.ids,
            store.trained,
            store.id_starts,
            store.trained_starts,
            store.lengths,
            store.before,
            self.plan.documents,
            # The number after the last pack stands for an empty one.
            np.append(self.plan.offsets, self.plan.offsets[-1]),
        )
        self._dealing = None if context is None else Dealing.of(self.plan, context)
        self._sums = PackSums(store, self._documents, self._dealing)
        self._columns = dict(store.columns)
        if SHARED_COLUMN in self._columns and not (self._columns[SHARED_COLUMN] > 0).any():
            del self._columns[SHARED_COLUMN]
        self._known_order = -1, np.zeros(0, np.int64)

    def left(self, state: int | None) -> int | None:
        """Return the steps from ``state`` until every epoch is consumed, None without end."""
        if self.epochs is None:
            return None
        return max(0, -(-(self._end - (state or 0)) // self.packs_a_step))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the order in which documents come, in which a state counts.

        How many documents a step takes is not part of it.
        """
        order = hashlib.sha256(f"{self.shuffle} {self.seed}".encode())
        for column in (self.store.id_starts[self.plan.documents], self.plan.offsets):
            order.update(column.tobytes())
        return order.hexdigest()

    def epoch(self, state: int | None) -> float:
        """Return the passes over the data after so many packs."""
        return min(state or 0, self._end) / len(self.plan)

    def __len__(self) -> int:
        """Return the micro-batches of this rank in the epochs asked for (one if endless)."""
        return (self.left(None) or self.steps_an_epoch) * self.accumulation

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's Batches of the epochs asked for (one if endless)."""
        for step in self.steps(count=len(self) // self.accumulation):
            yield from step.batches

    def steps(self, state: int | None = None, count: int | None = None) -> Iterator[Step]:
        """Yield steps, which a thread assembles before they are asked for.

        Args:
            state: packs consumed by all ranks before.
            count: steps after which it ends; None for no end.

        Raises:
            DataError: a document cannot be read where the store says it is.
        """
        fewest, most = PREFETCHED_STEPS
        depth = min(max(PREFETCHED_BYTES // self._sizes.bytes, fewest), most)
        size = -(-depth // ASSEMBLY_CALLS)
        position = state or 0
        end = sys.maxsize if count is None else position + count * self.packs_a_step
        starts = range(position, end, self.packs_a_step)
        tasks = (
            self._assembly(starts[first : first + size]) for first in range(0, len(starts), size)
        )
        with closing(prefetch(tasks, depth // size)) as assembled:
            for steps, unreadable in assembled:
                yield from steps
                self._check_read(unreadable)

    def heaviest(self) -> Step:
        """Return a step of the packs whose attention costs most.

        No step of a run attends to more. It has no place in the run.

        Raises:
            DataError: a document cannot be read where the store says it is.
        """
        costliest = np.argsort(-self._sums.costs[:-1], kind="mergesort")[: self.packs_a_step]
        packs = np.full(self.packs_a_step, len(self.plan), np.int64)  # the rest are empty
        packs[: len(costliest)] = costliest
        steps, unreadable = self._assembly_of([packs], [0])()
        self._check_read(unreadable)
        return next(steps)

    def _check_read(self, unreadable: int) -> None:
        """Raise if a document could not be read.

        Raises:
            DataError: ``unreadable`` is a document, not -1.
        """
        if unreadable >= 0:
            raise DataError(
                f"{self.store.path}: document {unreadable} is not where the store says it is; the "
                "file is damaged: delete it, and it will be built again"
            )

    def _assembly(self, positions: Sequence[int]) -> Callable[[], tuple[Iterator[Step], int]]:
        """Return a function that assembles the steps that begin at ``positions``.

        It returns the steps, and the document that it could not read, or -1.
        """
        return self._assembly_of([self._packs_at(position) for position in positions], positions)

    def _assembly_of(
        self, packs_of_steps: Sequence[np.ndarray], positions: Sequence[int]
    ) -> Callable[[], tuple[Iterator[Step], int]]:
        """Return what ``_assembly`` returns, for steps of these packs of all ranks."""
        slots = self.packs_a_step * self.width
        own_packs = []
        counts = []
        for packs in packs_of_steps:
            counts.append(self._sums.counts(packs, slots))
            # Packs stay as they come if documents keep their order.
            places = np.arange(len(packs)).reshape(self.accumulation, self.ranks, self.batch_size)
            if not self.in_order:
                costs = self._sums.costs[packs]
                places = balanced_packs(costs, self.accumulation, self.ranks, self.batch_size)
            own_packs.append(packs[places[:, self.rank].ravel()])
        memory = StepMemory(
            self._sizes,
            len(positions),
            self.pin,
            self._columns,
            self.store.of_targets,
            self._dealing,
        )
        stacked = np.stack(own_packs)

        def run() -> tuple[Iterator[Step], int]:
            built, unreadable = memory.assemble(stacked, self._documents)
            ends = [min(position + self.packs_a_step, self._end) for position in positions]
            return map(Step, memory.batches(built), counts, positions, ends), unreadable

        return run

    def packs_of(self, position: int) -> list[np.ndarray]:
        """Return the documents of each pack of the step that begins at ``position``.

        Packs are those of all ranks; documents are numbers in the store.
        """
        packed = self._documents.packed
        offsets = self._documents.offsets
        return [packed[offsets[pack] : offsets[pack + 1]] for pack in self._packs_at(position)]

    def _packs_at(self, position: int) -> np.ndarray:
        """Return the numbers of the packs of the step that begins at ``position``.

        After the last epoch they are those of the empty pack.
        """
        packs = np.full(self.packs_a_step, len(self.plan), np.int64)
        taken = 0
        while taken < self.packs_a_step:
            epoch, index = divmod(position + taken, len(self.plan))
            if self.epochs is not None and epoch >= self.epochs:
                break
            known, order = self._known_order
            if known != epoch:
                order = np.arange(len(self.plan))
                if self.shuffle:
                    order = np.random.default_rng([self.seed, epoch]).permutation(order)
                self._known_order = epoch, order
            piece = order[index : index + self.packs_a_step - taken]
            packs[taken : taken + len(piece)] = piece
            taken += len(piece)
        return packs


def prefetch(tasks: Iterable[Callable[[], _Result]], depth: int) -> Generator[_Result, None, None]:
    """Yield the results of ``tasks`` in their order.

    One thread calls the tasks; they are taken from their iterable in the consumer's thread. Closing
    the iterator waits for the task that runs and drops the others.

    Args:
        tasks: functions that compute a result each.
        depth: results that are computed, or being computed, before they are asked for.

    Raises:
        Exception: what a task raised, in the place of its result.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
    waiting: deque[Future[_Result]] = deque()
    try:
        for task in tasks:
            waiting.append(thread.submit(task))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # An interpreter that ends has already joined the thread, and its modules may be gone.
        if not sys.is_finalizing():
            thread.shutdown(cancel_futures=True)


def create_dataloader(dataset: RowSource, tokenizer: Any, config: ChronicalsConfig) -> BatchStream:
    """Return Batches of a data set: tokenised into a store, checked, packed, prefetched.

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
