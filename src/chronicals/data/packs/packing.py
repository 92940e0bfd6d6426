"""Packing: which documents share a row of ``max_seq_length`` tokens, a pack.

- ``best-fit``: longest documents first, each into the fullest pack that still holds it (best-fit
  decreasing; Johnson, 1973). Lengths are small integers, so packs are kept by the room they have
  left, and a bitmap finds the smallest sufficient room: O(n) for n documents plus a short scan
  each.
- ``first-fit``: longest documents first, each into the first pack that still holds it (first-fit
  decreasing). A tree of the most room in each half of the packs finds it: O(n log n).
- ``in-order``: documents as they come, a new pack if the next one does not fit (next-fit).
  Nothing is sorted, and packs are not shuffled: documents that stand together in the data stay
  together, and steps take them in their order.

Plans run in numba without the GIL.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from chronicals.data.packs.compiled import compiled

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackPlan:
    """The documents of each pack, and of each part of it if several processes share it.

    Attributes:
        documents: int64 ``[n]``, indices of all documents, pack after pack.
        offsets: int64 ``[packs + 1]``: pack p holds ``documents[offsets[p]:offsets[p + 1]]``.
        tokens: documents' tokens in all packs.
        max_seq_length: width of a pack.
        parts: number of parts of a pack, of equal width (``parts.py``).
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
        strategy: ``best-fit``, ``first-fit`` or ``in-order``; see the module's docstring.
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
    documents = np.arange(ends[-1]) + np.repeat(items[packed] - ends[:-1], counts)
    return documents, ends[offsets]


def _count_trailing_zeros(_context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.int64(types.uint64), generate


_trailing_zeros: Any = intrinsic(_count_trailing_zeros)
"""``_trailing_zeros(bits)`` of a uint64, one instruction.

Every other branch of a search by halves would be mispredicted.
"""


@compiled(nogil=True)
def _lowest_set_at_least(words: np.ndarray, summary: np.ndarray, start: int) -> int:
    """Return the first set bit at or after ``start`` of a two-level bitmap, or -1.

    Args:
        words: uint64, the bits.
        summary: uint64, a bit for each word that is not 0.
        start: number of the first bit that counts.
    """
    word = start >> 6
    bits = words[word] & (~np.uint64(0) << np.uint64(start & 63))
    if not bits:
        word += 1
        upper = word >> 6
        if upper >= summary.size:
            return -1
        marks = summary[upper] & (~np.uint64(0) << np.uint64(word & 63))
        while not marks:
            upper += 1
            if upper >= summary.size:
                return -1
            marks = summary[upper]
        word = (upper << 6) + _trailing_zeros(marks)
        bits = words[word]
    return (word << 6) + _trailing_zeros(bits)


@compiled(nogil=True)
def _best_fit_decreasing(
    sizes: np.ndarray, width: int, limit: int, rooms: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    order, decreasing = _longest_first(sizes, width)
    most_packs = sizes.size + rooms.size
    # head[room] is a pack with that room left, below[pack] the next pack with the same room.
    head = np.full(width + 1, -1, np.int32)
    below = np.empty(most_packs, np.int32)
    documents_in = np.zeros(most_packs, np.int32)
    # Bit `room` is set if there is a pack with that room left.
    words = np.zeros((width >> 6) + 2, np.uint64)
    summary = np.zeros((words.size >> 6) + 1, np.uint64)
    pack_of = np.empty(sizes.size, np.int32)
    packs = rooms.size
    for pack in range(packs):
        left = rooms[pack]
        documents_in[pack] = taken[pack]
        if left > 0 and taken[pack] < limit:
            below[pack] = head[left]
            head[left] = pack
            words[left >> 6] |= np.uint64(1) << np.uint64(left & 63)
            summary[left >> 12] |= np.uint64(1) << np.uint64((left >> 6) & 63)
    for rank, size in enumerate(decreasing):
        room = _lowest_set_at_least(words, summary, size)
        if room < 0:
            pack = packs
            room = width
            packs += 1
        else:
            pack = head[room]
            head[room] = below[pack]
            if head[room] < 0:
                words[room >> 6] &= ~(np.uint64(1) << np.uint64(room & 63))
                if not words[room >> 6]:
                    summary[room >> 12] &= ~(np.uint64(1) << np.uint64((room >> 6) & 63))
        pack_of[rank] = pack
        documents_in[pack] += 1
        left = room - size
        if left > 0 and documents_in[pack] < limit:
            below[pack] = head[left]
            head[left] = pack
            words[left >> 6] |= np.uint64(1) << np.uint64(left & 63)
            summary[left >> 12] |= np.uint64(1) << np.uint64((left >> 6) & 63)
    documents_in[: rooms.size] -= taken
    return _pack_after_pack(order, pack_of, documents_in[:packs])


@compiled(nogil=True)
def _first_fit_decreasing(
    sizes: np.ndarray, width: int, limit: int, rooms: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    order, decreasing = _longest_first(sizes, width)
    # Two packs that were not closed at the limit hold more than one width: that bounds their
    # number.
    new_packs = min(sizes.size, 2 * decreasing.sum() // width + sizes.size // limit + 2)
    most_packs = rooms.size + new_packs
    leaves = 1
    while leaves < most_packs:
        leaves *= 2
    # most[leaves + pack] is the room of a pack (all of it before it is opened), most[node] the most
    # below a node.
    most = np.full(2 * leaves, width, np.int32)
    documents_in = np.zeros(leaves, np.int32)
    pack_of = np.empty(sizes.size, np.int32)
    packs = rooms.size
    for pack in range(packs):
        documents_in[pack] = taken[pack]
        most[leaves + pack] = rooms[pack] if taken[pack] < limit else 0
    if packs:
        for node in range(leaves - 1, 0, -1):
            most[node] = max(most[2 * node], most[2 * node + 1])
    for rank, size in enumerate(decreasing):
        node = 1
        while node < leaves:
            node = 2 * node + (most[2 * node] < size)
        pack = node - leaves
        packs = max(packs, pack + 1)
        pack_of[rank] = pack
        documents_in[pack] += 1
        most[node] = most[node] - size if documents_in[pack] < limit else 0
        while node > 1:
            node //= 2
            left = max(most[2 * node], most[2 * node + 1])
            if most[node] == left:
                break
            most[node] = left
    documents_in[: rooms.size] -= taken
    return _pack_after_pack(order, pack_of, documents_in[:packs])


@compiled(nogil=True)
def _next_fit(
    sizes: np.ndarray, width: int, limit: int, rooms: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(sizes.size + 1, np.int64)
    packs = held = room = 0
    for document in range(sizes.size):
        if not packs or room < sizes[document] or held == limit:
            offsets[packs] = document
            packs = packs + 1
            held = 0
            room = width
        held += 1
        room -= sizes[document]
    offsets[packs] = sizes.size
    return np.arange(sizes.size), offsets[: packs + 1].copy()


@compiled(nogil=True)
def _longest_first(sizes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices by decreasing size, and the sizes in that order.

    Equal sizes stay in their order (counting sort).
    """
    start = np.zeros(width + 2, np.int64)
    for size in sizes:
        start[width - size + 1] += 1
    start = np.cumsum(start)
    order = np.empty(sizes.size, np.int64)
    decreasing = np.empty(sizes.size, np.int64)
    for document, size in enumerate(sizes):
        place = start[width - size]
        order[place] = document
        decreasing[place] = size
        start[width - size] += 1
    return order, decreasing


@compiled(nogil=True)
def _pack_after_pack(
    order: np.ndarray, pack_of: np.ndarray, documents_in: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents of pack 0, of pack 1 and so on, and the bounds of packs.

    Args:
        order: documents in the order in which they were packed.
        pack_of: the pack of each.
        documents_in: number of documents of each pack.
    """
    offsets = np.zeros(documents_in.size + 1, np.int64)
    offsets[1:] = np.cumsum(documents_in)
    place = offsets[:-1].copy()
    documents = np.empty(order.size, np.int64)
    for rank, document in enumerate(order):
        pack = pack_of[rank]
        documents[place[pack]] = document
        place[pack] += 1
    return documents, offsets


STRATEGIES = {
    "best-fit": _best_fit_decreasing,
    "first-fit": _first_fit_decreasing,
    "in-order": _next_fit,
}
"""Packing functions by name; they return the documents and offsets of a plan.

Their arguments are sizes, width of a pack, most documents in a pack, rooms, and taken. The last two
are the room left in packs that exist already and their numbers of documents; these packs come first
in the plan. ``in-order`` does not return to earlier packs and takes ``NO_PACKS``.
"""

NO_PACKS = np.zeros(0, np.int64), np.zeros(0, np.int64)
"""Room and number of documents of no packs."""


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
