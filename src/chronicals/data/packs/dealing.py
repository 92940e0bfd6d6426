"""Dealing: what each of several ranks has of a micro-batch that they share.

The micro-batch is assembled whole, T tokens, as one process would have it. Of c ranks each takes T
/ c: two chunks of every split document first, then the documents that lie whole in its parts
(``parts.py``), then filler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, Context, SharedKeys, SplitDocuments
from chronicals.data.packs.assembly import FILLER_DOCUMENT, WIDTH_BUCKETS
from chronicals.data.packs.packing import PackPlan
from chronicals.data.packs.parts import SPLIT

NOBODY = -2
"""In the place of a rank's number: filler, which is not dealt."""


class RankShare(NamedTuple):
    """What a rank has.

    Attributes:
        rows: int64 ``[T / c]``, where each of its tokens stands in the micro-batch, or ``FILLER_DOCUMENT``.
        positions: int64 ``[T / c]``, of filler; zero elsewhere.
        documents: int64 ``[N]``, the documents that it has, or has a part of, by their place in the
            micro-batch, or ``FILLER_DOCUMENT``.
        bounds: int32 ``[N + 1]``, of these, in its own tokens.
        longest: bound on the length of any document, filler and split ones included.
        split: where some are.
    """

    rows: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    bounds: np.ndarray
    longest: int
    split: SplitDocuments | None

    def of_rows(self, column: np.ndarray, filler: int) -> np.ndarray:
        """A column of tokens."""
        there = self.rows >= 0
        return np.where(
            there.reshape(-1, *[1] * (column.ndim - 1)),
            column[np.where(there, self.rows, 0)],
            filler,
        )


@dataclass(frozen=True)
class Dealing:
    """Who has which document of a store.

    Attributes:
        context: the ranks.
        rank_of: int64 ``[documents + 1]``, by their number: a rank, or ``SPLIT``; the last one is
            of filler.
    """

    context: Context
    rank_of: np.ndarray

    @classmethod
    def of(cls, plan: PackPlan, context: Context) -> Dealing:
        """Raises ValueError where parts of packs cannot be divided among the ranks."""
        if plan.part_of is None or plan.parts % context.count:
            raise ValueError(
                f"pack_parts={plan.parts}: so many parts cannot be divided among "
                f"context_parallel={context.count} processes; "
                "take a multiple, or leave it out"
            )
        rank_of = np.full(len(plan.documents) + 1, NOBODY)
        rank_of[plan.documents] = np.where(
            plan.part_of < 0, SPLIT, plan.part_of // (plan.parts // context.count)
        )
        return cls(context, rank_of)

    def share(self, numbers: np.ndarray, bounds: np.ndarray, entries: int) -> RankShare:
        """Of the documents with these numbers (``FILLER_DOCUMENT`` is -1) and bounds; those of the share
        come in multiples of ``entries``."""
        return share_of(bounds, self.rank_of[numbers], self.context, entries)


def share_of(
    bounds: np.ndarray, ranks: np.ndarray, context: Context, entries: int = 1
) -> RankShare:
    """What a rank has of T tokens, a multiple of the number of ranks.

    Args:
        bounds: ``[N + 1]``, of the documents.
        ranks: ``[N]``, who has each: a rank, ``SPLIT`` or ``NOBODY``.
        entries: its bounds come in multiples of so many.

    Raises:
        ValueError: its documents are more than T / c tokens.
    """
    bounds = bounds.astype(np.int64)
    lengths = np.diff(bounds)
    size = int(bounds[-1]) // context.count
    split = np.flatnonzero(ranks == SPLIT)
    own = np.flatnonzero(ranks == context.rank)
    chunk = -(-lengths[split] // (2 * context.count))
    starts = bounds[split][:, None] + chunk[:, None] * np.array(context.chunks(context.rank))
    begins = np.append(starts.ravel(), bounds[own])
    counts = np.append(np.repeat(chunk, 2), lengths[own])
    ends = np.append(np.repeat(bounds[split + 1], 2), bounds[own + 1])
    rows = ranges(begins, counts)
    rows[rows >= np.repeat(ends, counts)] = FILLER_DOCUMENT
    left = size - len(rows)
    if left < 0 or int(bounds[-1]) % context.count:
        raise ValueError(
            f"{len(rows)} of {bounds[-1]} tokens on one of {context.count} ranks: more than it "
            "has room for"
        )
    longest = int(lengths[own].max(initial=1))
    share = WIDTH_BUCKETS
    while -(-size // share) < longest and share > 1:
        share //= 2
    longest = -(-size // share)
    filler = (
        np.diff(np.append(np.arange(0, left, longest), left)) if left else np.zeros(0, np.int64)
    )
    ends = np.cumsum(np.concatenate([[0], 2 * chunk, lengths[own], filler]))
    documents = np.concatenate([split, own, np.full(len(filler), FILLER_DOCUMENT)])
    missing = -len(documents) % entries
    ends = np.append(ends, [size] * missing)
    documents = np.append(documents, [FILLER_DOCUMENT] * missing)
    positions = np.append(np.zeros(size - left, np.int64), ranges(np.zeros_like(filler), filler))
    rows = np.append(rows, np.full(left, FILLER_DOCUMENT))
    parts = None
    if len(split):
        parts = _split(chunk, context, ends[len(split) :], longest)
        longest = max(longest, int(2 * context.count * chunk.max()))
    return RankShare(
        rows.astype(np.int64),
        positions,
        documents.astype(np.int64),
        ends.astype(np.int32),
        longest,
        parts,
    )


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``starts[i] … starts[i] + counts[i] - 1`` for each i, one behind the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)


def _split(chunk: np.ndarray, context: Context, whole: np.ndarray, longest: int) -> SplitDocuments:
    """What a rank knows of documents that are cut into chunks of these lengths.

    Args:
        whole, longest: bounds of its other documents in its own tokens, and the one on their
            lengths.
    """
    inner = context.inner
    outer = context.outer
    tokens = int(2 * chunk.sum())
    before = 2 * (np.cumsum(chunk) - chunk)
    first = context.rank - context.rank % inner
    held = sorted(
        (number, rank, place)
        for rank in range(inner)
        for place, number in enumerate(context.chunks(first + rank))
    )
    _, sender, place = np.array(
        held
    ).T  # of the chunks of ranks that exchange heads, in the order of the document
    order = ranges(
        (sender * tokens + before[:, None] + place * chunk[:, None]).ravel(),
        np.repeat(chunk, 2 * inner),
    )
    lengths = 2 * inner * chunk
    keys = None
    if outer > 1:
        lengths = np.repeat(inner * chunk, 2)
        keys = _gathered_keys(chunk, context, inner * tokens)
    found = SplitDocuments(
        context,
        tokens,
        _bounds(lengths),
        int(lengths.max()),
        _bounds(np.diff(whole)),
        longest,
        keys=keys,
    )
    if np.array_equal(order, np.arange(len(order))):
        return found
    return replace(found, order=torch.as_tensor(order), back=torch.as_tensor(np.argsort(order)))


def _gathered_keys(chunk: np.ndarray, context: Context, tokens: int) -> SharedKeys:
    """What the two pieces of each document that this rank and its neighbours have attend to: the
    document up to their ends.

    Args:
        tokens: that each of ``outer`` neighbourhoods sends, a piece from the front and one from the
            back of each document.
    """
    outer = context.outer
    piece = context.inner * chunk
    own = context.rank // context.inner
    numbers = np.arange(2 * outer)
    sender = np.minimum(numbers, 2 * outer - 1 - numbers)
    place = (numbers >= outer).astype(np.int64)
    begins = sender * tokens + 2 * (np.cumsum(piece) - piece)[:, None] + place * piece[:, None]
    order = ranges(begins.ravel(), np.repeat(piece, 2 * outer))
    seen = (piece[:, None] * np.array([own + 1, 2 * outer - own])).ravel()
    index = order[ranges(np.repeat(2 * outer * (np.cumsum(piece) - piece), 2), seen)]
    places = np.full((2, outer * tokens), -1, np.int64)
    places[np.repeat(np.tile([0, 1], len(chunk)), seen), index] = np.arange(len(index))
    return SharedKeys(
        torch.as_tensor(index), _bounds(seen), torch.as_tensor(places), int(seen.max())
    )


def _bounds(lengths: np.ndarray) -> Tensor:
    return torch.as_tensor(np.append(0, np.cumsum(lengths)).astype(np.int32))


def part_of(batch: Batch, ranks: np.ndarray, context: Context, filler: int = 0) -> Batch:
    """A rank's part of a Batch in host memory, without shared prompts.

    Args:
        ranks: ``[N]``, who has each document: a rank, ``SPLIT`` or ``NOBODY``.
        filler: the token that filler documents are made of.
    """
    if batch.keys is not None:
        raise ValueError("documents that share prompts are dealt where a Batch is assembled")
    share = share_of(batch.cu_seqlens.numpy(), ranks, context)
    at = torch.as_tensor(share.rows)
    documents = torch.as_tensor(share.documents)

    def taken(column: Tensor, places: Tensor, filler: int) -> Tensor:
        found = column[places.clamp(min=0)]
        found[places < 0] = filler
        return found

    targets = taken(batch.targets, at, IGNORED)
    return replace(
        batch,
        input_ids=taken(batch.input_ids, at, filler),
        targets=targets,
        position_ids=taken(batch.position_ids, at, 0) + torch.as_tensor(share.positions),
        cu_seqlens=torch.as_tensor(share.bounds),
        max_seqlen=share.longest,
        trained=int((targets >= 0).sum()),
        weights=None if batch.weights is None else taken(batch.weights, at, 0),
        segments={
            name: taken(column, documents, FILLER_DOCUMENT)
            for name, column in batch.segments.items()
        },
        tokens={name: taken(column, at, 0) for name, column in batch.tokens.items()},
        split=share.split,
    )
