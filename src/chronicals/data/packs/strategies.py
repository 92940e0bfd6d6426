"""Greedy placements, which numba compiles: of documents in packs and parts, of packs in a step.

- ``best-fit``: longest documents first, each into the fullest pack that still holds it (best-fit
  decreasing; Johnson, 1973). Lengths are small integers, so packs are kept by the room they have
  left, and a bitmap finds the smallest sufficient room: O(n) for n documents plus a short scan
  each.
- ``first-fit``: longest documents first, each into the first pack that still holds it (first-fit
  decreasing). A tree of the most room in each half of the packs finds it: O(n log n).
- ``in-order``: documents as they come, a new pack if the next one does not fit (next-fit).
  Nothing is sorted, and packs are not shuffled: documents that stand together in the data stay
  together, and steps take them in their order.
- ``deal_parts`` and ``balanced_packs``: the costliest first, each to the least costly place that
  has room (Graham's longest-processing-time rule). Attention costs the sum of the documents' squared
  lengths, so places of equal width may differ by an order of magnitude.

Those of a whole plan run without the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from chronicals.data.packs.compiled import compiled

SPLIT = -1
"""Part number of a document that is split, so that every part has two chunks of it."""

IN_ORDER = "in-order"
"""The strategy that keeps the order of documents."""


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
    IN_ORDER: _next_fit,
}
"""Packing functions by name; they return the documents and offsets of a plan.

Their arguments are sizes, width of a pack, most documents in a pack, rooms, and taken. The last two
are the room left in packs that exist already and their numbers of documents; these packs come first
in the plan. ``in-order`` does not return to earlier packs and takes ``NO_PACKS``.
"""

NO_PACKS = np.zeros(0, np.int64), np.zeros(0, np.int64)
"""Room and number of documents of no packs."""


@compiled(nogil=True)
def deal_parts(
    part_of: np.ndarray,
    offsets: np.ndarray,
    sizes: np.ndarray,
    costs: np.ndarray,
    width: int,
    limit: int,
    parts: int,
) -> None:
    """Change ``part_of`` in each pack in which all items fit and the costliest part costs less."""
    for pack in range(offsets.size - 1):
        first = offsets[pack]
        end = offsets[pack + 1]
        cost_before = np.zeros(parts, np.int64)
        cost = np.zeros(parts, np.int64)
        room = np.full(parts, width)
        items_in = np.zeros(parts, np.int64)
        dealt = part_of[first:end].copy()
        for item in range(first, end):
            if part_of[item] < 0:
                room -= sizes[item]
                items_in += 1
            else:
                cost_before[part_of[item]] += costs[item]
        fits = True
        for item in range(first, end):
            if part_of[item] < 0:
                continue
            chosen = -1
            for part in range(parts):
                has_room = room[part] >= sizes[item] and items_in[part] < limit
                if has_room and (chosen < 0 or cost[part] < cost[chosen]):
                    chosen = part
            if chosen < 0:
                fits = False
                break
            dealt[item - first] = chosen
            room[chosen] -= sizes[item]
            items_in[chosen] += 1
            cost[chosen] += costs[item]
        if fits and cost.max() < cost_before.max():
            part_of[first:end] = dealt


@compiled(nogil=True)
def next_parts(
    sizes: np.ndarray, split: np.ndarray, width: int, limit: int, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pack and the part of each item as they come, each int64 ``[items]``.

    An item goes into the first part from that of the last item on that has room, or into a new
    pack.

    Args:
        sizes: int64 ``[items]``, tokens of each.
        split: int64 ``[items]``, tokens that each takes of every part if it is split.
        width: tokens of a part.
        limit: most items in a part.
        parts: of a pack.
    """
    pack_of = np.empty(sizes.size, np.int64)
    part_of = np.empty(sizes.size, np.int64)
    room = np.full(parts, width)
    items_in = np.zeros(parts, np.int64)
    pack = last = 0
    for item, size in enumerate(sizes):
        if size > width:
            if room.min() < split[item] or items_in.max() >= limit:
                pack = pack + 1
                last = 0
                room[:] = width
                items_in[:] = 0
            room -= split[item]
            items_in += 1
            pack_of[item] = pack
            part_of[item] = -1
            continue
        while last < parts and (room[last] < size or items_in[last] >= limit):
            last += 1
        if last == parts:
            pack = pack + 1
            last = 0
            room[:] = width
            items_in[:] = 0
        room[last] -= size
        items_in[last] += 1
        pack_of[item] = pack
        part_of[item] = last
    return pack_of, part_of


@compiled
def balanced_packs(costs: np.ndarray, accumulation: int, ranks: int, batch_size: int) -> np.ndarray:
    """Return the packs of each micro-batch, int64 ``[accumulation, ranks, batch_size]``.

    Every pack occurs once. Within a micro-batch their numbers rise; ties go to the lower number, so
    a single micro-batch holds the step as it comes. The costlier neighbour goes to the first rank
    and to the last in turn.

    Args:
        costs: int64 ``[accumulation · ranks · batch_size]``, what attention costs in each pack of
            the step.
        accumulation: micro-batches of a rank in the step.
        ranks: number of ranks.
        batch_size: packs of a micro-batch.
    """
    bins = accumulation * ranks
    packs_in = np.zeros(bins, np.int64)
    total = np.zeros(bins, np.int64)
    bin_of = np.empty(costs.size, np.int64)
    for pack in np.argsort(-costs, kind="mergesort"):
        chosen = -1
        for candidate in range(bins):
            has_room = packs_in[candidate] < batch_size
            if has_room and (chosen < 0 or total[candidate] < total[chosen]):
                chosen = candidate
        bin_of[pack] = chosen
        packs_in[chosen] += 1
        total[chosen] += costs[pack]
    next_place = np.empty(bins, np.int64)
    for turn, chosen in enumerate(np.argsort(-total, kind="mergesort")):
        micro = turn // ranks
        rank = turn % ranks
        if micro % 2 == 1:
            rank = ranks - 1 - rank
        next_place[chosen] = (micro * ranks + rank) * batch_size
    packs = np.empty(costs.size, np.int64)
    for pack in range(costs.size):
        packs[next_place[bin_of[pack]]] = pack
        next_place[bin_of[pack]] += 1
    return packs.reshape(accumulation, ranks, batch_size)
