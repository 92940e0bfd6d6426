"""From a token store to Batches: packs in a shuffled endless stream, dealt to steps, micro-batches and ranks.

The stream is a function of the seed: epoch e is the plan's packs in the order of generator (seed, e). A position in it is
the number of packs consumed by all ranks together. Step s takes ``batch_size × accumulation × ranks`` packs in a row, so
its documents depend on that product alone; who takes which of them is dealt by cost. Past the last epoch the stream goes
on with empty packs, which count nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.ahead import StepsAhead, UnreadableDocument
from chronicals.data.assembly import BUCKETS, ENTRIES, ENTRY_SHARES, LONGEST, TRAINED, Documents, Shape
from chronicals.data.building import open_store
from chronicals.data.dealing import deal
from chronicals.data.gate import DataError
from chronicals.data.packing import PackPlan, plan_packs
from chronicals.data.sources import Source
from chronicals.data.store import TokenStore

logger = logging.getLogger(__name__)

STEPS_AHEAD, BYTES_AHEAD = (2, 64), 1 << 26
"""Steps assembled ahead: so many as take 64 MiB, within these bounds. 64 MiB outlast a consumer that waits for the GIL."""


@dataclass(frozen=True)
class Counts:
    """What a step holds on all ranks together, known before it is computed.

    Attributes:
        targets: positions that are trained.
        tokens: documents' tokens; filler is not counted.
        documents: documents.
        slots: positions, filler included.
        packs: packs with a document.
        weight: sum of the weights of the targets where Batches have weights, None where each counts one.
    """

    targets: int
    tokens: int
    documents: int
    slots: int
    packs: int
    weight: float | None = None


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of one optimizer step.

    Attributes:
        batches: as many as there are accumulation steps.
        counts: of the whole step, all ranks.
        began: position at which it begins, packs consumed before it.
        position: packs consumed once this step is done, empty ones not counted; what a checkpoint stores.
    """

    batches: list[Batch]
    counts: Counts
    began: int
    position: int


def plan_of(store: TokenStore, config: ChronicalsConfig) -> PackPlan:
    """The packs of one epoch."""
    limit = config.max_documents if config.use_sequence_packing else 1
    return plan_packs(store.lengths, config.max_seq_length, limit, config.packing_strategy)


def filler_token(tokenizer: Any, embedding_rows: int) -> int:
    """The token that filler documents are made of: the tokenizer's padding token, or 0 where the model's embedding lacks it."""
    token = tokenizer.pad_token_id
    if token is None or 0 <= token < embedding_rows:
        return token or 0
    _say_filler(tokenizer.pad_token, token, embedding_rows)
    return 0


@functools.cache
def _say_filler(name: str, token: int, rows: int) -> None:
    logger.info("padding token %r has id %d, the embedding %d rows: packs are filled with token 0 instead", name, token, rows)


class BatchStream:
    """Deterministic Batches from a store; see the module's docstring.

    Args:
        store: tokenised documents.
        config: widths, batch size, accumulation, packing, seed.
        padding_token_id: the token that filler documents are made of.
        epochs: passes after which only empty packs follow; None never ends.
        rank, ranks: this process and how many there are.
        shuffle: False keeps the plan's order (evaluation).
        pin: build into pinned memory, for copies that do not wait.
        plan: ``plan_of(store, config)`` where it was made before.
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
    ):
        self.store, self.epochs, self.shuffle, self.pin = store, epochs, shuffle, pin
        self.width, self.batch_size = config.max_seq_length, config.batch_size
        self.accumulation, self.rank, self.ranks = config.gradient_accumulation_steps, rank, ranks
        self.seed = config.seed
        self.plan = plan_of(store, config) if plan is None else plan
        most_entries = self.batch_size * (self.plan.max_documents + BUCKETS)
        share = -(-most_entries // ENTRY_SHARES)
        self._shape = Shape(self.accumulation, self.batch_size, self.width, share, padding_token_id)
        # The number after the last pack stands for an empty one.
        offsets = np.append(self.plan.offsets, self.plan.offsets[-1])
        self._documents = Documents(
            store.ids, store.trained, store.id_starts, store.trained_starts, store.lengths, self.plan.documents, offsets
        )
        self._sums = _sums_of_packs(self._documents, store.targets)
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
        return self.steps_left(0)

    def steps_left(self, position: int) -> int | None:
        """Steps from ``position`` until every epoch is consumed, None without end."""
        return None if self.epochs is None else max(0, -(-(len(self.plan) * self.epochs - position) // self.packs_a_step))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the order in which documents come, which a position counts in; how many a step takes is not part of it."""
        order = hashlib.sha256(f"{self.shuffle} {self.seed}".encode())
        for column in (self.store.id_starts[self.plan.documents], self.plan.offsets):
            order.update(column.tobytes())
        return order.hexdigest()

    def epoch_at(self, position: int) -> float:
        """Passes over the data after so many packs."""
        return self._consumed(position) / len(self.plan)

    def __len__(self) -> int:
        """Micro-batches of this rank in the epochs asked for (one if endless)."""
        return (self.steps_in_all or self.steps_an_epoch) * self.accumulation

    def __iter__(self) -> Iterator[Batch]:
        """This rank's Batches of the epochs asked for (one if endless)."""
        for step in self.steps(count=len(self) // self.accumulation):
            yield from step.batches

    def steps(self, position: int = 0, count: int | None = None) -> Iterator[Step]:
        """Steps from ``position`` on, assembled ahead by a thread; ends after ``count`` of them, if given.

        Raises:
            DataError: a document cannot be read where the store says it is.
        """
        fewest, most = STEPS_AHEAD
        depth = min(max(BYTES_AHEAD // self._shape.bytes, fewest), most)
        submitted: deque[tuple[Memory, Counts]] = deque()
        with closing(StepsAhead(self._documents, self._shape, depth)) as ahead:
            while count is None or count > 0:
                while len(submitted) < (depth if count is None else min(depth, count)):
                    packs = self._packs_at(position + len(submitted) * self.packs_a_step)
                    memory = Memory(self._shape, self.pin)
                    ahead.submit(self._dealt(packs)[:, self.rank].ravel(), memory.addresses)
                    submitted.append((memory, self._counts(packs)))
                try:
                    facts = ahead.take()
                except UnreadableDocument as error:
                    raise DataError(
                        f"{self.store.path}: document {error.document} is not where the store says it is; the file is "
                        "damaged: delete it, and it will be built again"
                    ) from None
                memory, counts = submitted.popleft()
                began, position, count = position, position + self.packs_a_step, None if count is None else count - 1
                yield Step(memory.batches(facts), counts, began, self._consumed(position))

    def _consumed(self, position: int) -> int:
        return position if self.epochs is None else min(position, len(self.plan) * self.epochs)

    def packs_of(self, position: int) -> list[np.ndarray]:
        """The documents of each pack of the step that begins at ``position``, of all ranks, by their number in the store."""
        packed, offsets = self._documents.packed, self._documents.offsets
        return [packed[offsets[pack] : offsets[pack + 1]] for pack in self._packs_at(position)]

    def _packs_at(self, position: int) -> np.ndarray:
        """Packs of the step that begins at ``position``, by their number in the plan, empty ones past the last epoch."""
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

    def _dealt(self, packs: np.ndarray) -> np.ndarray:
        """``[accumulation, ranks, batch_size]``: the packs of a step as they are dealt."""
        return packs[deal(self._sums[packs, COST], self.accumulation, self.ranks, self.batch_size)]

    def _counts(self, packs: np.ndarray) -> Counts:
        targets, tokens, documents, _ = self._sums[packs].sum(0).tolist()
        filled = int((packs < len(self.plan)).sum())
        return Counts(targets, tokens, documents, self.packs_a_step * self.width, filled)


class Memory:
    """What a step is assembled in; its Batches are views of it, so it lives until the last of them is dropped.

    Operations of torch give the GIL away, which another thread may then keep for 5 ms; those of numpy do not. So pinned
    memory alone is torch's: it must know which copies to the card still read from it.
    """

    def __init__(self, shape: Shape, pin: bool):
        self.shape = shape
        sizes = shape.batches * 3 * shape.tokens, shape.batches * shape.bounds
        self.columns: Any
        self.bounds: Any
        if pin:
            self.columns = torch.empty(sizes[0], dtype=torch.int64, pin_memory=True)
            self.bounds = torch.empty(sizes[1], dtype=torch.int32, pin_memory=True)
            self.addresses = self.columns.data_ptr(), self.bounds.data_ptr()
        else:
            self.columns, self.bounds = np.empty(sizes[0], np.int64), np.empty(sizes[1], np.int32)
            self.addresses = self.columns.ctypes.data, self.bounds.ctypes.data

    def batches(self, facts: list[list[int]]) -> list[Batch]:
        """The Batches in it, once it is assembled."""
        size, room, batches = self.shape.tokens, self.shape.bounds, []
        for number, fact in enumerate(facts):
            at, first = 3 * number * size, number * room
            batches.append(
                Batch(
                    torch.as_tensor(self.columns[at : at + size]),
                    torch.as_tensor(self.columns[at + size : at + 2 * size]),
                    torch.as_tensor(self.columns[at + 2 * size : at + 3 * size]),
                    torch.as_tensor(self.bounds[first : first + fact[ENTRIES] + 1]),
                    max_seqlen=fact[LONGEST],
                    trained=fact[TRAINED],
                )
            )
        return batches


COST = 3
"""Column of a pack's cost among its sums."""


def _sums_of_packs(documents: Documents, targets: np.ndarray) -> np.ndarray:
    """int64 ``[packs, 4]``: targets, tokens and documents of each pack, and what attention costs in it, Σ length²."""
    lengths = documents.lengths
    columns = [
        np.diff(np.concatenate([[0], np.cumsum(values[documents.packed])])[documents.offsets])
        for values in (targets, lengths, np.ones_like(lengths), lengths**2)
    ]
    return np.stack(columns, axis=1).astype(np.int64)


def create_dataloader(dataset: Source, tokenizer: Any, config: ChronicalsConfig) -> BatchStream:
    """Batches of a data set: tokenised into a store, checked, packed, prefetched.

    Args:
        dataset: files, folders, hub names or rows in memory, as ``read_records`` takes them.
        tokenizer: a transformers tokenizer.
        config: widths, sizes, seed; ``num_epochs`` passes are made (one by default).

    Returns:
        An iterable of ``Batch`` with a length.

    Raises:
        DataError: training on it would be wrong; the message names the rules, the rows and the remedies.
    """
    store = open_store(dataset, tokenizer, config)
    return BatchStream(store, config, tokenizer.pad_token_id or 0, epochs=config.num_epochs or 1)
