"""Packs in parts, one or more for each of the processes that share a pack.

A pack of W tokens has P parts of W / P. A document that fits in a part lies whole in one, and the
process that has the part needs nothing from others to attend to it. A longer document of L tokens
is split into 2 P chunks of ⌈L / 2P⌉, of which every part takes two; so the parts of a pack have the
same room left for others. Long documents are packed first, the others into the room of parts.

If the strategy sorts documents, parts are made even: attention in a part costs the sum of its whole
documents' squared lengths. Parts without a long document share a pack with those next to them in
cost. Then the documents of a pack are dealt to its parts anew, longest first, each to the least
costly part with room (Graham's rule), if that is more even.
"""

from __future__ import annotations

import numpy as np

from chronicals.data.packs.compiled import compiled
from chronicals.data.packs.packing import (
    NO_PACKS,
    STRATEGIES,
    PackPlan,
    documents_of_items,
    plan_packs,
)

SPLIT = -1
"""Part number of a document that is split, so that every part has two chunks of it."""

IN_ORDER = "in-order"
"""The strategy that keeps the order of documents."""


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
    if strategy == IN_ORDER:
        pack_of, part_of = _next_parts(totals, _split_size(totals, parts), width, limit, parts)
        order = np.lexsort((np.arange(totals.size), pack_of))
    else:
        costs = np.add.reduceat(sizes**2, bounds[:-1]) if sizes.size else sizes
        packed = _packed_by_size(totals, costs, width, limit, parts, strategy)
        order, pack_of, part_of = _evened(*packed, totals, costs, width, limit, parts)
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


def _split_size(totals: np.ndarray, parts: int) -> np.ndarray:
    """Return the tokens that split documents take of each part."""
    return 2 * -(-totals // (2 * parts))


def _packed_by_size(
    totals: np.ndarray, costs: np.ndarray, width: int, limit: int, parts: int, strategy: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return items, and the pack and the part of each.

    Args:
        totals: int64 ``[items]``, tokens of each.
        costs: int64 ``[items]``, what attention costs in each.
        width: tokens of a part.
        limit: most items in a part.
        parts: of a pack.
        strategy: one of ``STRATEGIES``.
    """
    long = np.flatnonzero(totals > width)
    short = np.flatnonzero(totals <= width)
    # Split documents take as much of every part, so they are packed as into parts of one pack.
    sizes = _split_size(totals[long], parts)
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
    return (
        np.append(long[placed], items),
        np.append(pack_of_long, place[bin_of] // parts),
        np.append(np.full(long.size, SPLIT), place[bin_of] % parts),
    )


def _evened(
    order: np.ndarray,
    pack_of: np.ndarray,
    part_of: np.ndarray,
    totals: np.ndarray,
    costs: np.ndarray,
    width: int,
    limit: int,
    parts: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return items pack after pack, and the pack and the part of each, evenly dealt to parts."""
    # The longest items of each pack are dealt first.
    by_pack = np.lexsort((-totals[order], pack_of))
    order = order[by_pack]
    pack_of = pack_of[by_pack]
    part_of = part_of[by_pack]
    offsets = np.append(0, np.cumsum(np.bincount(pack_of)))
    sizes = np.where(part_of == SPLIT, _split_size(totals[order], parts), totals[order])
    _deal(part_of, offsets, sizes, costs[order], width, limit, parts)
    in_parts = np.lexsort((part_of, pack_of))
    return order[in_parts], pack_of, part_of[in_parts]


@compiled(nogil=True)
def _deal(
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
def _next_parts(
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
