"""From a token store to Batches: packs in a shuffled endless stream, dealt to steps, micro-batches and ranks.

The stream is a function of the seed: epoch e is the plan's packs in the order of generator (seed, e). A position in it is
the number of packs consumed by all ranks together. Step s takes ``batch_size × accumulation × ranks`` packs in a row, so
its documents depend on that product alone. Past the last epoch the stream goes on with empty packs, which count nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.building import open_store
from chronicals.data.packing import PackPlan, plan_packs
from chronicals.data.rows import Record
from chronicals.data.store import TokenStore

BUCKETS = 8
"""``max_seqlen`` is a pack's width or that divided by 2, 4 or 8; so a tail holds at most this many filler documents."""

ENTRY_SHARES = 8
"""Entries of the bounds come in shares of the most that can be: FlashAttention-4's backward holds 128 rows more for each."""

PREFETCHED_STEPS = 2


@dataclass(frozen=True)
class Counts:
    """What a step holds on all ranks together, known before it is computed.

    Attributes:
        targets: positions that are trained.
        tokens: documents' tokens; filler is not counted.
        documents: documents.
        slots: positions, filler included.
    """

    targets: int
    tokens: int
    documents: int
    slots: int


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of one optimizer step.

    Attributes:
        batches: as many as there are accumulation steps.
        counts: of the whole step, all ranks.
        position: packs consumed once this step is done; what a checkpoint stores.
    """

    batches: list[Batch]
    counts: Counts
    position: int


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
    ):
        self.store, self.epochs, self.shuffle, self.pin = store, epochs, shuffle, pin
        self.width, self.batch_size = config.max_seq_length, config.batch_size
        self.accumulation, self.rank, self.ranks = config.gradient_accumulation_steps, rank, ranks
        self.seed, self.padding_token_id = config.seed, padding_token_id
        self.plan: PackPlan = plan_packs(store.lengths, self.width, config.max_documents if config.use_sequence_packing else 1)
        self.max_entries = self.batch_size * (self.plan.max_documents + BUCKETS)
        self._orders: dict[int, np.ndarray] = {}

    @property
    def packs_a_step(self) -> int:
        return self.batch_size * self.accumulation * self.ranks

    @property
    def steps_an_epoch(self) -> int:
        return -(-len(self.plan) // self.packs_a_step)

    @property
    def steps_in_all(self) -> int | None:
        """Steps until every epoch is consumed, None without end."""
        return None if self.epochs is None else -(-len(self.plan) * self.epochs // self.packs_a_step)

    def epoch_at(self, position: int) -> float:
        """Passes over the data after so many packs."""
        passes = position / len(self.plan)
        return passes if self.epochs is None else min(passes, float(self.epochs))

    def __len__(self) -> int:
        """Micro-batches of this rank in the epochs asked for (one if endless)."""
        return (self.steps_in_all or self.steps_an_epoch) * self.accumulation

    def __iter__(self) -> Iterator[Batch]:
        """This rank's Batches of the epochs asked for (one if endless)."""
        for step in self.steps(count=len(self) // self.accumulation):
            yield from step.batches

    def steps(self, position: int = 0, count: int | None = None) -> Iterator[Step]:
        """Steps from ``position`` on, built ahead by a background thread; ends after ``count`` of them, if given."""
        ahead: deque[Future[Step]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as builder:
            try:
                produced = 0
                while count is None or produced < count:
                    while len(ahead) <= PREFETCHED_STEPS and (count is None or produced + len(ahead) < count):
                        start = position + (produced + len(ahead)) * self.packs_a_step
                        ahead.append(builder.submit(self.step, start))
                    yield ahead.popleft().result()
                    produced += 1
            finally:
                for future in ahead:
                    future.cancel()

    def step(self, position: int) -> Step:
        """The step that begins at ``position``."""
        packs = self.packs_of(position)
        documents = np.concatenate([*packs, np.zeros(0, np.int64)])
        counts = Counts(
            targets=int(self.store.targets[documents].sum()),
            tokens=int(self.store.lengths[documents].sum()),
            documents=len(documents),
            slots=self.packs_a_step * self.width,
        )
        mine = [
            packs[(micro * self.ranks + self.rank) * self.batch_size :][: self.batch_size] for micro in range(self.accumulation)
        ]
        return Step([self._assemble(group) for group in mine], counts, position + self.packs_a_step)

    def packs_of(self, position: int) -> list[np.ndarray]:
        """The documents of each pack of the step that begins at ``position``, of all ranks, by their number in the store."""
        return [self._pack_at(position + n) for n in range(self.packs_a_step)]

    def _pack_at(self, position: int) -> np.ndarray:
        epoch, index = divmod(position, len(self.plan))
        if self.epochs is not None and epoch >= self.epochs:
            return np.zeros(0, np.int64)
        if epoch not in self._orders:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.plan))
            self._orders = {epoch: order if self.shuffle else np.arange(len(self.plan))}
        return self.plan[self._orders[epoch][index]]

    def _assemble(self, packs: list[np.ndarray]) -> Batch:
        longest = max((int(self.store.lengths[pack].max()) for pack in packs if len(pack)), default=1)
        bucket = next(width for width in self._bucket_widths() if width >= longest)
        total = self.width * self.batch_size
        ids = np.full(total, self.padding_token_id, np.int64)
        targets = np.full(total, IGNORED, np.int64)
        positions = np.empty(total, np.int64)
        ends = []
        for number, pack in enumerate(packs):
            at = number * self.width
            for document in pack:
                tokens, trained = self.store.document(document)
                end = at + len(tokens)
                ids[at:end] = tokens
                np.copyto(targets[at : end - 1], tokens[1:], where=trained[1:].astype(bool))
                positions[at:end] = np.arange(len(tokens))
                ends.append(end)
                at = end
            while at < (number + 1) * self.width:
                end = min(at + bucket, (number + 1) * self.width)
                positions[at:end] = np.arange(end - at)
                ends.append(end)
                at = end
        share = -(-self.max_entries // ENTRY_SHARES)
        bounds = np.full(-(-len(ends) // share) * share + 1, total, np.int32)
        bounds[0] = 0
        bounds[1 : len(ends) + 1] = ends
        ids_T, targets_T, positions_T, cu_seqlens = (torch.from_numpy(a) for a in (ids, targets, positions, bounds))
        batch = Batch(ids_T, targets_T, positions_T, cu_seqlens, bucket, int((targets_T != IGNORED).sum()))
        return batch.pin_memory() if self.pin else batch

    def _bucket_widths(self) -> list[int]:
        return [-(-self.width // share) for share in (8, 4, 2, 1)]


def create_dataloader(dataset: str | Path | Iterable[Record], tokenizer: Any, config: ChronicalsConfig) -> BatchStream:
    """Batches of a data set: tokenised into a store, checked, packed, prefetched.

    Args:
        dataset: a file, or rows in memory: ``messages``, ``prompt`` and ``completion``, ``text``, or ``input_ids``.
        tokenizer: a transformers tokenizer.
        config: widths, sizes, seed; ``num_epochs`` passes are made (one by default).

    Returns:
        An iterable of ``Batch`` with a length.

    Raises:
        DataError: a row does not parse, or there is nothing to train on.
    """
    store = open_store(dataset, tokenizer, config)
    return BatchStream(store, config, tokenizer.pad_token_id or 0, epochs=config.num_epochs or 1)
