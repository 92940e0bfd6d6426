"""Packing: which documents share a row of ``max_seq_length`` tokens, a pack.

A pack may be in parts, one or more for each of the processes that share it. A pack of W tokens has
P parts of W / P. A document that fits in a part lies whole in one, and the process that has the
part needs nothing from others to attend to it. A longer document of L tokens is split into 2 P
chunks of ⌈L / 2P⌉, of which every part takes two; so the parts of a pack have the same room left
for others. Long documents are packed first, the others into the room of parts.

If the strategy sorts documents, parts are made even: attention in a part costs the sum of its whole
documents' squared lengths. Parts without a long document share a pack with those next to them in
cost. Then the documents of a pack are dealt to its parts anew, longest first, if that is more even.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data.making.store import TokenStore, ranges
from chronicals.data.packs.strategies import (
    IN_ORDER,
    NO_PACKS,
    SPLIT,
    STRATEGIES,
    deal_parts,
    next_parts,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackPlan:
    """The documents of each pack, and of each part of it if several processes share it.

    Attributes:
        documents: int64 ``[n]``, indices of all documents, pack after pack.
        offsets: int64 ``[packs + 1]``: pack p holds ``documents[offsets[p]:offsets[p + 1]]``.
        tokens: documents' tokens in all packs.
        max_seq_length: width of a pack.
        parts: number of parts of a pack, of equal width (see above).
        part_of: int64 ``[n]``, the part in which each of ``documents`` lies whole, or ``SPLIT``;
            None for packs of one part.
    """

    documents: np.ndarray
    offsets: np.ndarray
    tokens: int
    max_seq_length: int
    parts: int = 1
    part_of: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        return self.documents[self.offsets[pack] : self.offsets[pack + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[pack] for pack in range(len(self)))

    @property
    def max_documents(self) -> int:
        """Number of documents in the pack that has the most."""
        return int(np.diff(self.offsets).max(initial=0))

    @property
    def fill(self) -> float:
        """Share of the positions that hold a document's token."""
        return self.tokens / max(len(self) * self.max_seq_length, 1)


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


def plan_packs(
    lengths: Sequence[int] | np.ndarray,
    max_seq_length: int,
    max_documents: int | None = None,
    strategy: str = "best-fit",
    items: np.ndarray | None = None,
) -> PackPlan:
    """Assign every document to a pack; the documents of an item share one.

    Args:
        lengths: tokens of each document, 1 to ``max_seq_length``.
        max_seq_length: width of a pack.
        max_documents: most documents in a pack; no limit by default.
        strategy: ``best-fit``, ``first-fit`` or ``in-order``, as ``strategies.py`` describes them.
        items: int64 ``[items + 1]``: item i is the documents ``items[i]:items[i + 1]``; by default
            every document is one.

    Raises:
        ValueError: a length is out of range, an item is longer than a pack or has more than
            ``max_documents``, which is below 1, or there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy={strategy!r}: no such strategy; there are {', '.join(STRATEGIES)}"
        )
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    if sizes.size and (sizes.min() < 1 or sizes.max() > max_seq_length):
        wrong = int(np.flatnonzero((sizes < 1) | (sizes > max_seq_length))[0])
        raise ValueError(
            f"lengths[{wrong}]={sizes[wrong]}: must be between 1 and "
            f"max_seq_length={max_seq_length}"
        )
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents={max_documents}: a pack must hold at least one document")
    limit = max_documents or max(sizes.size, 1)
    if items is None:
        documents, offsets = STRATEGIES[strategy](sizes, max_seq_length, limit, *NO_PACKS)
    else:
        totals = np.add.reduceat(sizes, items[:-1])
        widest = int(np.diff(items).max())
        if totals.max() > max_seq_length:
            wrong = int(np.argmax(totals > max_seq_length))
            raise ValueError(
                f"item {wrong} has {totals[wrong]} tokens: must be at most "
                f"max_seq_length={max_seq_length}"
            )
        if limit < widest:
            raise ValueError(
                f"max_documents={max_documents}: an item has {widest} documents, which must share "
                "a pack"
            )
        documents, offsets = documents_of_items(
            items, *STRATEGIES[strategy](totals, max_seq_length, limit // widest, *NO_PACKS)
        )
    return PackPlan(documents, offsets, int(sizes.sum()), max_seq_length)


def documents_of_items(
    items: np.ndarray, packed: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return documents pack after pack and the bounds of packs, from the same of items.

    Args:
        items: int64 ``[items + 1]``: item i is the documents ``items[i]:items[i + 1]``.
        packed: int64 ``[items]``, items pack after pack.
        offsets: int64 ``[packs + 1]``, bounds of the packs in ``packed``.
    """
    counts = np.diff(items)[packed]
    ends = np.append(0, np.cumsum(counts))
    return ranges(items[packed], counts), ends[offsets]


def plan_parts(
    lengths: np.ndarray,
    max_seq_length: int,
    max_documents: int | None,
    strategy: str,
    items: np.ndarray | None,
    parts: int,
) -> PackPlan:
    """Assign every document to a pack and to a part of it; arguments as of ``plan_packs``.

    Args:
        lengths: tokens of each document.
        max_seq_length: width of a pack.
        max_documents: most documents in a pack; None for no limit.
        strategy: one of ``STRATEGIES``.
        items: int64 ``[items + 1]``, bounds of items; None if every document is one.
        parts: of a pack. Each holds ``max_documents // parts`` documents at most.

    Raises:
        ValueError: as ``plan_packs``; the width is no multiple of twice the parts, a part can hold
            no document, or an item of several documents is longer than a part.
    """
    if parts == 1:
        return plan_packs(lengths, max_seq_length, max_documents, strategy, items)
    if max_seq_length % (2 * parts):
        raise ValueError(
            f"max_seq_length={max_seq_length}: packs in {parts} parts (context_parallel, "
            "pack_parts) need a multiple of "
            f"{2 * parts}"
        )
    plan_packs(lengths[:0], max_seq_length, max_documents, strategy)  # checks the arguments
    sizes = np.ascontiguousarray(lengths, np.int64)
    width = max_seq_length // parts
    if sizes.size and (sizes.min() < 1 or sizes.max() > max_seq_length):
        raise ValueError(
            f"lengths of {sizes.min()} to {sizes.max()}: must be between 1 and "
            f"max_seq_length={max_seq_length}"
        )
    bounds = np.arange(sizes.size + 1) if items is None else items
    totals = np.add.reduceat(sizes, bounds[:-1]) if sizes.size else sizes
    counts = np.diff(bounds)
    too_long = np.flatnonzero((totals > width) & (counts > 1))
    if too_long.size:
        item = too_long[0]
        raise ValueError(
            f"item {item} has {totals[item]} tokens in {counts[item]} documents, "
            "which one process must have: at "
            f"most max_seq_length / {parts} = {width}; raise max_seq_length, or lower "
            "context_parallel (pack_parts)"
        )
    widest = int(counts.max(initial=1))
    limit = (max_documents or max(sizes.size, 1) * parts * widest) // (parts * widest)
    if not limit:
        raise ValueError(
            f"max_documents={max_documents}: {parts} parts of a pack must hold {widest} each"
        )
    # Tokens that each takes of every part if it is split.
    split = 2 * -(-totals // (2 * parts))
    if strategy == IN_ORDER:
        pack_of, part_of = next_parts(totals, split, width, limit, parts)
        order = np.lexsort((np.arange(totals.size), pack_of))
    else:
        costs = np.add.reduceat(sizes**2, bounds[:-1]) if sizes.size else sizes
        order, pack_of, part_of = _packed_by_size(
            totals, split, costs, width, limit, parts, strategy
        )
    offsets = np.append(0, np.cumsum(np.bincount(pack_of, minlength=1 if sizes.size else 0)))
    documents, offsets = documents_of_items(bounds, order, offsets)
    return PackPlan(
        documents,
        offsets,
        int(sizes.sum()),
        max_seq_length,
        parts,
        np.repeat(part_of, counts[order]),
    )


def _packed_by_size(
    totals: np.ndarray,
    split: np.ndarray,
    costs: np.ndarray,
    width: int,
    limit: int,
    parts: int,
    strategy: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return items pack after pack, and the pack and the part of each, evenly dealt to parts.

    Args:
        totals: int64 ``[items]``, tokens of each.
        split: int64 ``[items]``, tokens that each takes of every part if it is split.
        costs: int64 ``[items]``, what attention costs in each.
        width: tokens of a part.
        limit: most items in a part.
        parts: of a pack.
        strategy: one of ``STRATEGIES``.
    """
    long = np.flatnonzero(totals > width)
    short = np.flatnonzero(totals <= width)
    # Split documents take as much of every part, so they are packed as into parts of one pack.
    sizes = split[long]
    placed, offsets = STRATEGIES[strategy](sizes, width, limit, *NO_PACKS)
    split_packs = len(offsets) - 1
    pack_of_long = np.repeat(np.arange(split_packs), np.diff(offsets))
    items_in = np.bincount(pack_of_long, minlength=split_packs)
    used = np.bincount(pack_of_long, sizes[placed], split_packs).astype(np.int64)
    # The others go into the parts of these packs, then into new parts.
    filled, ends = STRATEGIES[strategy](
        totals[short], width, limit, np.repeat(width - used, parts), np.repeat(items_in, parts)
    )
    bins = len(ends) - 1
    bin_of = np.repeat(np.arange(bins), np.diff(ends))
    items = short[filled]
    # New parts of like cost share a pack.
    first_new = split_packs * parts
    cost = np.bincount(bin_of, costs[items], bins)
    place = np.arange(bins)
    by_cost = first_new + np.argsort(-cost[first_new:], kind="stable")
    place[by_cost] = np.arange(first_new, bins)
    order = np.append(long[placed], items)
    pack_of = np.append(pack_of_long, place[bin_of] // parts)
    part_of = np.append(np.full(long.size, SPLIT), place[bin_of] % parts)
    # The longest items of each pack are dealt to its parts first.
    by_pack = np.lexsort((-totals[order], pack_of))
    order = order[by_pack]
    pack_of = pack_of[by_pack]
    part_of = part_of[by_pack]
    offsets = np.append(0, np.cumsum(np.bincount(pack_of)))
    taken = np.where(part_of == SPLIT, split[order], totals[order])
    deal_parts(part_of, offsets, taken, costs[order], width, limit, parts)
    in_parts = np.lexsort((part_of, pack_of))
    return order[in_parts], pack_of, part_of[in_parts]


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
            packed: dict[str, list[int]] = {
                "input_ids": [],
                "labels": [],
                "position_ids": [],
                "sequence_ids": [],
            }
            for place, number in enumerate(pack):
                packed["input_ids"] += ids[number]
                packed["labels"] += labels[number]
                packed["position_ids"] += range(len(ids[number]))
                packed["sequence_ids"] += [place] * len(ids[number])
            tail = self.max_seq_length - len(packed["input_ids"])
            packed["input_ids"] += [self.padding_token_id] * tail
            packed["labels"] += [-100] * tail
            packed["position_ids"] += range(tail)
            packed["sequence_ids"] += [self.PADDING] * tail
            rows.append(packed)
        return rows

    def create_attention_mask(
        self, sequence_ids: Tensor | Sequence[Sequence[int]], causal: bool = True
    ) -> Tensor:
        """Return a mask, bool ``[B, 1, S, S]``.

        It is True if the row's position may attend to the column's. A position attends to its own
        document, with ``causal`` no further than itself. Padding attends to itself only, so that no
        row of the softmax is empty; nothing attends to padding.

        Args:
            sequence_ids: ``[B, S]`` or ``[S]``, as ``pack`` gives them.
            causal: no position attends to later ones.
        """
        ids = torch.as_tensor(sequence_ids)
        if ids.ndim == 1:
            ids = ids[None]
        allowed = (ids[:, :, None] == ids[:, None, :]) & (ids != self.PADDING)[:, None, :]
        if causal:
            allowed = allowed.tril()
        return (allowed | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device))[:, None]
