"""Dealing: the share that each of several ranks has of a micro-batch.

The micro-batch is assembled whole, T tokens, as one process would have it. Of c ranks each takes T
/ c tokens. With c = 2, a document S that is split into 2 c chunks, and whole documents A, B and D:

    micro-batch    S₀ S₁ S₂ S₃  A  B  D  filler
    rank 0         S₀ S₁  A  D  filler              (S₀ S₃ if keys are gathered)
    rank 1         S₂ S₃  B  filler                 (S₁ S₂ if keys are gathered)

Two chunks of every split document come first, then the documents that lie whole in the rank's parts
of the packs (``packing.py``), then filler of its own. The filler of the micro-batch is not dealt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, Context, SharedKeys, SplitDocuments
from chronicals.data.making.store import ranges
from chronicals.data.packs.assembly import FILLER_DOCUMENT, width_bucket
from chronicals.data.packs.packing import PackPlan
from chronicals.data.packs.strategies import SPLIT

NOBODY = -2
"""Rank number of filler, which no rank gets."""


class RankShare(NamedTuple):
    """The share of a rank.

    Attributes:
        rows: int64 ``[T / c]``, the position of each of its tokens in the micro-batch, or
            ``FILLER_DOCUMENT``.
        positions: int64 ``[T / c]``, position ids of filler; zero elsewhere.
        documents: int64 ``[N]``, the documents that it holds whole or in chunks, by their index in
            the micro-batch, or ``FILLER_DOCUMENT``.
        bounds: int32 ``[N + 1]``, bounds of these documents in its own tokens.
        longest: bound on the length of any document, filler and split ones included.
        split: the split documents; None if there are none.
    """

    rows: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    bounds: np.ndarray
    longest: int
    split: SplitDocuments | None

    def of_rows(self, column: np.ndarray, filler: int) -> np.ndarray:
        """Return this rank's part of a column of tokens, ``[T, ...]``."""
        is_token = self.rows >= 0
        tokens = column[np.where(is_token, self.rows, 0)]
        return np.where(is_token.reshape(-1, *[1] * (column.ndim - 1)), tokens, filler)


@dataclass(frozen=True)
class Dealing:
    """The rank that has each document of a store.

    Attributes:
        context: the ranks.
        rank_of: int64 ``[documents + 1]``, by number of document: a rank, or ``SPLIT``. The last
            entry, which number -1 reads, is that of filler.
    """

    context: Context
    rank_of: np.ndarray

    @classmethod
    def of(cls, plan: PackPlan, context: Context) -> Dealing:
        """Return who has which document of a plan.

        Raises:
            ValueError: parts of packs cannot be divided among the ranks.
        """
        if plan.part_of is None or plan.parts % context.count:
            raise ValueError(
                f"pack_parts={plan.parts}: so many parts cannot be divided among "
                f"context_parallel={context.count} processes; "
                "take a multiple, or leave it out"
            )
        parts_a_rank = plan.parts // context.count
        rank_of = np.full(len(plan.documents) + 1, NOBODY)
        rank_of[plan.documents] = np.where(plan.part_of < 0, SPLIT, plan.part_of // parts_a_rank)
        return cls(context, rank_of)


def rank_share(
    bounds: np.ndarray, ranks: np.ndarray, context: Context, entries: int = 1
) -> RankShare:
    """Return the share of a rank in T tokens; see the drawing above.

    Args:
        bounds: int ``[N + 1]``, of the documents.
        ranks: ``[N]``, who has each: a rank, ``SPLIT`` or ``NOBODY``.
        context: the ranks, and which of them this is.
        entries: the documents of the share come in multiples of so many.

    Raises:
        ValueError: T is no multiple of the number of ranks, or the rank's documents are more than
            T / c tokens.
    """
    bounds = bounds.astype(np.int64)
    lengths = np.diff(bounds)
    tokens = int(bounds[-1])
    size = tokens // context.count
    split = np.flatnonzero(ranks == SPLIT)
    whole = np.flatnonzero(ranks == context.rank)

    # Pieces of this rank: two chunks of each split document, then its whole documents.
    chunk = -(-lengths[split] // (2 * context.count))
    first_tokens = bounds[split][:, None]
    chunk_starts = first_tokens + chunk[:, None] * np.array(context.chunks(context.rank))
    starts = np.append(chunk_starts.ravel(), bounds[whole])
    counts = np.append(np.repeat(chunk, 2), lengths[whole])
    rows = ranges(starts, counts)
    # Chunks fill a split document up to a multiple of 2 c tokens: what lies behind it is filler.
    document_ends = np.append(np.repeat(bounds[split + 1], 2), bounds[whole + 1])
    rows[rows >= np.repeat(document_ends, counts)] = FILLER_DOCUMENT
    room = size - len(rows)
    if room < 0 or tokens % context.count:
        raise ValueError(
            f"{len(rows)} of {tokens} tokens on one of {context.count} ranks: more than it "
            "has room for"
        )

    # Filler in the room that is left, in documents of at most the bound of the whole ones.
    longest = width_bucket(int(lengths[whole].max(initial=1)), size)
    filler = np.zeros(0, np.int64)
    if room:
        filler = np.diff(np.append(np.arange(0, room, longest), room))
    positions = np.append(np.zeros(size - room, np.int64), ranges(np.zeros_like(filler), filler))
    rows = np.append(rows, np.full(room, FILLER_DOCUMENT))

    ends = np.cumsum(np.concatenate([[0], 2 * chunk, lengths[whole], filler]))
    documents = np.concatenate([split, whole, np.full(len(filler), FILLER_DOCUMENT)])
    empty = -len(documents) % entries
    documents = np.append(documents, [FILLER_DOCUMENT] * empty)
    ends = np.append(ends, [size] * empty)
    split_documents = None
    if len(split):
        split_documents = _split_documents(chunk, context, ends[len(split) :], longest)
        longest = max(longest, int(2 * context.count * chunk.max()))
    return RankShare(
        rows.astype(np.int64),
        positions,
        documents.astype(np.int64),
        ends.astype(np.int32),
        longest,
        split_documents,
    )


def _split_documents(
    chunk: np.ndarray, context: Context, whole_ends: np.ndarray, longest: int
) -> SplitDocuments:
    """Return what a rank knows of split documents.

    Args:
        chunk: int64 ``[S]``, length of the chunks of each.
        context: the ranks, and which of them this is.
        whole_ends: bounds of its other documents in its own tokens.
        longest: bound on the lengths of its other documents.
    """
    inner = context.inner
    tokens = int(2 * chunk.sum())
    before = 2 * (np.cumsum(chunk) - chunk)
    # Chunks of the ranks that exchange heads, in the order of the document: each rank sends its two
    # chunks of every document one behind the other.
    first = context.rank - context.rank % inner
    held = []
    for rank in range(inner):
        for place, number in enumerate(context.chunks(first + rank)):
            held.append((number, rank, place))
    _, sender, place = np.array(sorted(held)).T
    order = ranges(
        (sender * tokens + before[:, None] + place * chunk[:, None]).ravel(),
        np.repeat(chunk, 2 * inner),
    )
    lengths = 2 * inner * chunk
    keys = None
    if context.outer > 1:
        lengths = np.repeat(inner * chunk, 2)
        keys = _gathered_keys(chunk, context, inner * tokens)
    split = SplitDocuments(
        context,
        tokens,
        _bounds(lengths),
        int(lengths.max()),
        _bounds(np.diff(whole_ends)),
        longest,
        keys=keys,
    )
    if np.array_equal(order, np.arange(len(order))):
        return split
    return replace(split, order=torch.as_tensor(order), back=torch.as_tensor(np.argsort(order)))


def _gathered_keys(chunk: np.ndarray, context: Context, tokens: int) -> SharedKeys:
    """Return the keys that this rank's pieces of each split document attend to.

    A rank and its neighbours have two pieces of each document, one from its front and one from its
    back; each attends to the document up to its own end.

    Args:
        chunk: int64 ``[S]``, length of the chunks of each document.
        context: the ranks, and which of them this is.
        tokens: number that each of the ``outer`` neighbourhoods sends.
    """
    outer = context.outer
    own = context.rank // context.inner
    piece = context.inner * chunk
    before = np.cumsum(piece) - piece
    # Piece p of a document comes from neighbourhood p in the front half, mirrored in the back half.
    numbers = np.arange(2 * outer)
    sender = np.minimum(numbers, 2 * outer - 1 - numbers)
    place = (numbers >= outer).astype(np.int64)
    starts = sender * tokens + 2 * before[:, None] + place * piece[:, None]
    order = ranges(starts.ravel(), np.repeat(piece, 2 * outer))
    seen = (piece[:, None] * np.array([own + 1, 2 * outer - own])).ravel()
    index = order[ranges(np.repeat(2 * outer * before, 2), seen)]
    places = np.full((2, outer * tokens), -1, np.int64)
    row = np.repeat(np.tile([0, 1], len(chunk)), seen)
    places[row, index] = np.arange(len(index))
    return SharedKeys(
        torch.as_tensor(index), _bounds(seen), torch.as_tensor(places), int(seen.max())
    )


def _bounds(lengths: np.ndarray) -> Tensor:
    """Return the bounds of documents of these lengths, int32 ``[N + 1]``."""
    return torch.as_tensor(np.append(0, np.cumsum(lengths)).astype(np.int32))


def part_of(batch: Batch, ranks: np.ndarray, context: Context, filler: int = 0) -> Batch:
    """Return a rank's part of a Batch in host memory, without shared prompts.

    Args:
        batch: the whole micro-batch.
        ranks: ``[N]``, who has each document: a rank, ``SPLIT`` or ``NOBODY``.
        context: the ranks, and which of them this is.
        filler: the token that filler documents are made of.

    Raises:
        ValueError: documents share prompts.
    """
    if batch.keys is not None:
        raise ValueError("documents that share prompts are dealt where a Batch is assembled")
    share = rank_share(batch.cu_seqlens.numpy(), ranks, context)
    rows = torch.as_tensor(share.rows)
    documents = torch.as_tensor(share.documents)

    def taken(column: Tensor, places: Tensor, filler: int) -> Tensor:
        values = column[places.clamp(min=0)]
        values[places < 0] = filler
        return values

    targets = taken(batch.targets, rows, IGNORED)
    segments = {
        name: taken(column, documents, FILLER_DOCUMENT) for name, column in batch.segments.items()
    }
    return replace(
        batch,
        input_ids=taken(batch.input_ids, rows, filler),
        targets=targets,
        position_ids=taken(batch.position_ids, rows, 0) + torch.as_tensor(share.positions),
        cu_seqlens=torch.as_tensor(share.bounds),
        max_seqlen=share.longest,
        trained=int((targets >= 0).sum()),
        weights=None if batch.weights is None else taken(batch.weights, rows, 0),
        segments=segments,
        tokens={name: taken(column, rows, 0) for name, column in batch.tokens.items()},
        split=share.split,
    )
