"""Assembly: the documents of a step, written from the store's file into the tensors of its Batches.

It runs in numba without the GIL. Ids, targets and positions of the micro-batches lie in one array,
int64 ``[steps, batches, 3, T]``, the bounds of their documents in another, int32 ``[steps, batches,
bounds]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chronicals.batch import IGNORED
from chronicals.data.packs.compiled import compiled

WIDTH_BUCKETS = 8
"""``max_seqlen`` is a pack's width or that divided by 2, 4 or 8, so that few values occur.

The room that is left in a pack is at most this many filler documents, each no longer than the
smallest of these. A longer one would cost attention as much as a document of its length: behind a
document of half a pack, as much again as the document itself.
"""

ENTRY_SHARES = 8
"""The number of bounds is rounded up to a multiple of 1 / ``ENTRY_SHARES`` of its maximum.

Few numbers then occur, and few entries are unused: FlashAttention-4's backward allocates 128 more
rows for each entry.
"""

FILLER_DOCUMENT = -1
"""Document number of filler."""

MAX_SEQLEN_FACT = 0
ENTRIES_FACT = 1
TRAINED_FACT = 2
"""Indices into the facts of a micro-batch: ``max_seqlen``, entries of its bounds, targets."""


class PackedDocuments(NamedTuple):
    """The places of tokens in the file, and the documents of each pack.

    Attributes:
        ids: int32, the store's file.
        trained: uint8, the same file.
        id_starts, trained_starts: int64 ``[documents]``, where each begins in ``ids`` and in
            ``trained``.
        lengths: int64 ``[documents]``.
        before: int64 ``[documents]``, the position of each one's first token; not 0 behind a shared
            prompt.
        packed: int64, documents pack after pack.
        offsets: int64 ``[packs + 1]``: pack p holds ``packed[offsets[p]:offsets[p + 1]]``.
    """

    ids: np.ndarray
    trained: np.ndarray
    id_starts: np.ndarray
    trained_starts: np.ndarray
    lengths: np.ndarray
    before: np.ndarray
    packed: np.ndarray
    offsets: np.ndarray


class StepSizes(NamedTuple):
    """Sizes that are the same in every step.

    Attributes:
        batches: micro-batches of a rank in a step.
        packs: packs in a micro-batch.
        width: tokens in a pack.
        share: entries of the bounds come in multiples of this, ``ENTRY_SHARES`` of them at most; a
            single one is alone.
        filler: the token that filler documents are made of.
    """

    batches: int
    packs: int
    width: int
    share: int
    filler: int

    @property
    def bytes(self) -> int:
        """Memory of a step."""
        # three columns of int64, and bounds of int32
        return self.batches * (
            3 * 8 * self.packs * self.width + 4 * (ENTRY_SHARES * self.share + 1)
        )


@compiled(nogil=True)
def assemble(
    columns: np.ndarray,
    bounds: np.ndarray,
    numbers: np.ndarray,
    packs: np.ndarray,
    facts: np.ndarray,
    documents: PackedDocuments,
    sizes: StepSizes,
) -> tuple[int, int]:
    """Write the micro-batches of several steps.

    Args:
        columns: int64 ``[steps, batches, 3, T]``, filled here: ids, targets and positions.
        bounds: int32 ``[steps, batches, bounds]``, filled here as far as they are used.
        numbers: int64 ``[steps, batches, bounds]``, filled here: the document that begins at each
            bound, or ``FILLER_DOCUMENT``.
        packs: int64 ``[steps, batches · packs]``, by their number in the plan.
        facts: int64 ``[steps, batches, 3]``, filled here: ``MAX_SEQLEN_FACT``, ``ENTRIES_FACT`` and
            ``TRAINED_FACT`` of each micro-batch.
        documents: where tokens lie in the file, and the documents of each pack.
        sizes: of a step.

    Returns:
        The number of steps that are written; and the document that lies outside the file or does
        not fit in its pack, at which it stopped, or -1.
    """
    for step in range(len(packs)):
        for batch in range(sizes.batches):
            unreadable = _assemble_batch(
                columns[step, batch],
                bounds[step, batch],
                numbers[step, batch],
                packs[step, batch * sizes.packs : (batch + 1) * sizes.packs],
                facts[step, batch],
                documents,
                sizes,
            )
            if unreadable >= 0:
                return step, unreadable
    return len(packs), -1


@compiled(nogil=True)
def _assemble_batch(
    columns: np.ndarray,
    bounds: np.ndarray,
    numbers: np.ndarray,
    packs: np.ndarray,
    facts: np.ndarray,
    documents: PackedDocuments,
    sizes: StepSizes,
) -> int:
    """Write one micro-batch; return the document at which it stopped, or -1."""
    longest = 1
    for pack in packs:
        for document in documents.packed[documents.offsets[pack] : documents.offsets[pack + 1]]:
            longest = max(longest, documents.lengths[document])
    max_seqlen = width_bucket(longest, sizes.width)
    entries = trained = 0
    bounds[0] = 0
    numbers[:] = FILLER_DOCUMENT
    for place, pack in enumerate(packs):
        at = place * sizes.width
        end = (place + 1) * sizes.width
        for document in documents.packed[documents.offsets[pack] : documents.offsets[pack + 1]]:
            length = documents.lengths[document]
            first = documents.id_starts[document]
            first_trained = documents.trained_starts[document]
            inside = (
                0 <= first <= documents.ids.size - length
                and 0 <= first_trained <= documents.trained.size - length
            )
            if not (inside and 0 < length <= end - at):
                return document
            ids = documents.ids[first : first + length]
            mask = documents.trained[first_trained : first_trained + length]
            trained += _write_document(
                columns[:, at : at + length], ids, mask, documents.before[document]
            )
            numbers[entries] = document
            at += length
            entries += 1
            bounds[entries] = at
        while at < end:
            length = min(max_seqlen, -(-sizes.width // WIDTH_BUCKETS), end - at)
            columns[0, at : at + length] = sizes.filler
            columns[1, at : at + length] = IGNORED
            columns[2, at : at + length] = np.arange(length)
            at += length
            entries += 1
            bounds[entries] = at
    # One document that is all of a micro-batch is told by its bounds: attention has kernels for it.
    used = entries if entries == 1 else -(-entries // sizes.share) * sizes.share
    bounds[entries + 1 : used + 1] = columns.shape[1]
    facts[MAX_SEQLEN_FACT] = max_seqlen
    facts[ENTRIES_FACT] = used
    facts[TRAINED_FACT] = trained
    return -1


@compiled(nogil=True)
def width_bucket(longest: int, width: int) -> int:
    """Return the least of width / 8, / 4, / 2 and / 1, rounded up, that is at least ``longest``."""
    share = WIDTH_BUCKETS
    while -(-width // share) < longest and share > 1:
        share //= 2
    return -(-width // share)


@compiled(nogil=True)
def _write_document(columns: np.ndarray, ids: np.ndarray, trained: np.ndarray, before: int) -> int:
    """Write ids, targets (the next token if it is trained) and positions; return the targets."""
    # Three loops, for each becomes vector code.
    written = columns[0]
    targets = columns[1]
    positions = columns[2]
    last = ids.size - 1
    for place in range(ids.size):
        written[place] = ids[place]
    count = 0
    for place in range(last):
        targets[place] = ids[place + 1] if trained[place + 1] else IGNORED
        count += trained[place + 1] != 0
    targets[last] = IGNORED
    for place in range(ids.size):
        positions[place] = before + place
    return count
