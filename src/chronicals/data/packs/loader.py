"""Batches from a token store, whose packs are a shuffled endless stream.

It is divided over steps, micro-batches and ranks. The stream is a function of the seed: epoch e is
the plan's packs in the order of generator (seed, e). A position in it is the number of packs
consumed by all ranks together. Step s takes ``batch_size × accumulation × ranks`` packs in a row,
so its documents depend on that product alone. The cost of packs decides which micro-batch and rank
takes which of them (``balancing``). After the last epoch the stream goes on with empty packs, which
count nothing.
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
from chronicals.data.making.documents import SHARED_COLUMN
from chronicals.data.making.opening import open_store
from chronicals.data.making.store import TokenStore
from chronicals.data.packs.assembly import (
    ENTRY_SHARES,
    WIDTH_BUCKETS,
    PackedDocuments,
    StepSizes,
)
from chronicals.data.packs.balancing import PackSums, balanced_packs
from chronicals.data.packs.dealing import Dealing
from chronicals.data.packs.packing import PackPlan
from chronicals.data.packs.parts import IN_ORDER, plan_parts
from chronicals.data.packs.step_memory import StepMemory
from chronicals.data.packs.steps import Step
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.sources import RowSource

logger = logging.getLogger(__name__)

PREFETCHED_BYTES = 1 << 26
PREFETCHED_STEPS = (2, 64)
"""Memory of the prefetched steps in bytes, and the smallest and largest number of these steps."""

ASSEMBLY_CALLS = 4
"""Calls that assemble the prefetched steps, several steps each.

Between two calls the thread needs the GIL. If other threads run Python, it gets it after
``sys.getswitchinterval()`` (5 ms), which is longer than a small step takes.
"""

_Result = TypeVar("_Result")


def plan_epoch(store: TokenStore, config: ChronicalsConfig) -> PackPlan:
    """Return the packs of one epoch, in as many parts as processes share them."""
    items = store.items
    parts = config.pack_parts or config.context_parallel
    limit = config.max_documents
    if not config.use_sequence_packing:
        widest = 1 if items is None else int(np.diff(items).max(initial=1))
        limit = widest * parts
    return plan_parts(
        store.lengths, config.max_seq_length, limit, config.packing_strategy, items, parts
    )


def filler_token(tokenizer: Any, embedding_rows: int) -> int:
    """Return the token that filler documents are made of.

    It is the tokenizer's padding token, or 0 if the model's embedding lacks that one.
    """
    token = tokenizer.pad_token_id
    if token is None or 0 <= token < embedding_rows:
        return token or 0
    _log_filler(tokenizer.pad_token, token, embedding_rows)
    return 0


@functools.cache
def _log_filler(name: str, token: int, rows: int) -> None:
    logger.info(
        "padding token %r has id %d, the embedding %d rows: packs are filled with token 0 instead",
        name,
        token,
        rows,
    )


class BatchStream:
    """``Steps`` of deterministic Batches from a store; see the module's docstring.

    A state is a number of packs.

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

    @property
    def packs_a_step(self) -> int:
        """Packs that all ranks together take in a step."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def steps_an_epoch(self) -> int:
        """Steps that hold all packs once."""
        return -(-len(self.plan) // self.packs_a_step)

    @property
    def steps_in_all(self) -> int | None:
        """Steps until every epoch is consumed, None without end."""
        return self.left(None)

    def left(self, state: int | None) -> int | None:
        """Return the steps from ``state`` until every epoch is consumed, None without end."""
        if self.epochs is None:
            return None
        return max(0, -(-(len(self.plan) * self.epochs - (state or 0)) // self.packs_a_step))

    @property
    def data(self) -> str:
        """The store's key."""
        return self.store.key

    @property
    def earlier_data(self) -> tuple[str, ...]:
        """Keys that earlier versions of this package gave to the same content."""
        return self.store.earlier_keys

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
        return self._consumed(state or 0) / len(self.plan)

    def __len__(self) -> int:
        """Return the micro-batches of this rank in the epochs asked for (one if endless)."""
        return (self.steps_in_all or self.steps_an_epoch) * self.accumulation

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
                if unreadable >= 0:
                    raise DataError(
                        f"{self.store.path}: document {unreadable} is not where the store says it "
                        "is; the file is damaged: "
                        "delete it, and it will be built again"
                    )

    def _assembly(self, positions: Sequence[int]) -> Callable[[], tuple[Iterator[Step], int]]:
        """Return a function that assembles the steps that begin at ``positions``.

        It returns the steps, and the document that it could not read, or -1.
        """
        slots = self.packs_a_step * self.width
        own_packs = []
        counts = []
        for position in positions:
            packs = self._packs_at(position)
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
            ends = [self._consumed(position + self.packs_a_step) for position in positions]
            return map(Step, memory.batches(built), counts, positions, ends), unreadable

        return run

    def _consumed(self, position: int) -> int:
        return position if self.epochs is None else min(position, len(self.plan) * self.epochs)

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
