"""Documents in flat arrays: rows fitted to the width, and the gate's look at their tokens.

Shapes: T tokens of N documents together; document n holds the positions ``offsets[n]`` to
``offsets[n + 1]``.

Answers of an item share its prompt, which is in a pack once, as the item's last document. An item
of several answers to one prompt, p y₀, p y₁ …, becomes the documents z y₀, z y₁ … and x. Here z is
the last token of the prompt p, whose prediction differs from answer to answer, and x is what comes
before it. A document's ``shared`` says how many tokens of x stand before it: it attends to them,
and its positions go on from theirs.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chronicals.config import Overlong
from chronicals.data.reading.gate import DataReport
from chronicals.data.tokens.chat_template import TemplateError
from chronicals.data.tokens.template import Tokenizer

UNJUDGED = -1
"""Label of a row that does not judge its answer."""

MISMATCHED_SIDE = 1
"""Place in its item of an answer to another prompt, beside a judged answer."""

SHARED_COLUMN = "shared"
"""Column of the tokens of the item's last document that stand before this one, 0 for none.

That last document has ``IS_SHARED`` here.
"""

IS_SHARED = -1

MIN_SHARED_TOKENS = 16
"""Shorter prompts are not shared: a further document costs attention a tile of rows."""


@dataclass(frozen=True)
class Marks:
    """The tokens of a vocabulary that the gate looks for.

    Attributes:
        bos: id, -1 if there is none.
        pad: id, -1 if there is none or it is one of ``stops``.
        stops: ids at which an answer ends.
        special: finds the writing of a special token in a text.
    """

    bos: int
    pad: int
    stops: tuple[int, ...]
    special: re.Pattern[str] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks:
        """Return the marks of a tokenizer and of its chat template."""
        inner = tokenizer.tokenizer
        stops = {inner.eos_token_id} - {None}
        if inner.chat_template is not None:
            # Without a stop token, every conversation will be refused with the reason.
            with contextlib.suppress(TemplateError):
                stops.add(tokenizer.template.stop)
        added = {str(token) for token in inner.added_tokens_decoder.values() if token.special}
        names = added | set(inner.all_special_tokens)
        written = sorted((re.escape(name) for name in names if len(name) > 1), reverse=True)
        bos = -1 if inner.bos_token_id is None else inner.bos_token_id
        pad = inner.pad_token_id
        if pad is None or pad in stops:
            pad = -1
        return cls(bos, pad, tuple(stops), re.compile("|".join(written)) if written else None)


class DocumentPiece(NamedTuple):
    """A document by itself.

    Attributes:
        row: number of its row, from 0 in reading order.
        side: its place in its item.
        ids: int32 ``[tokens]``.
        trained: uint8 ``[tokens]``, 1 if the token is trained.
        shared: tokens of the item's shared prompt before it; -1 for that prompt
            (see above).
        label: the row's judgement of its answer: 1 good, 0 bad, -1 none.
    """

    row: int
    side: int
    ids: np.ndarray
    trained: np.ndarray
    shared: int = 0
    label: int = UNJUDGED


@dataclass(frozen=True)
class FlatDocuments:
    """Several documents end to end.

    Attributes:
        ids: int32 ``[T]``.
        trained: uint8 ``[T]``, 1 if the token is trained.
        offsets: int64 ``[N + 1]``, bounds of the documents.
        rows: int64 ``[N]``, the row each came from, from 0 in reading order.
        sides: int64 ``[N]``, the place of each in its item, which begins at each 0.
        shared: int64 ``[N]``, tokens of the item's last document that stand before it; -1 for that
            document.
        labels: int64 ``[N]``, the row's judgement of its answer: 1 good, 0 bad, -1 none.
    """

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    sides: np.ndarray
    shared: np.ndarray
    labels: np.ndarray

    @classmethod
    def joined(cls, pieces: Sequence[DocumentPiece]) -> FlatDocuments:
        """Return the documents that lie in ``pieces``, in their order."""
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece.ids) for piece in pieces], out=offsets[1:])
        return cls(
            np.concatenate([piece.ids for piece in pieces] or [np.zeros(0, np.int32)]),
            np.concatenate([piece.trained for piece in pieces] or [np.zeros(0, np.uint8)]),
            offsets,
            np.array([piece.row for piece in pieces], np.int64),
            np.array([piece.side for piece in pieces], np.int64),
            np.array([piece.shared for piece in pieces], np.int64),
            np.array([piece.label for piece in pieces], np.int64),
        )

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 ``[N]``."""
        return np.diff(self.offsets)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """Positions that predict a trained token, int64 ``[N]``.

        Nothing predicts the first token of a document.
        """
        starts = self.offsets[:-1]
        running = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        # An empty last document begins behind the last token.
        first_tokens = np.minimum(starts, max(len(self.trained) - 1, 0))
        first_trained = np.where(self.lengths > 0, self.trained[first_tokens], 0)
        return running[self.offsets[1:]] - running[starts] - first_trained

    def only(self, kept: np.ndarray) -> FlatDocuments:
        """Return the documents for which ``kept`` (bool ``[N]``) is True."""
        if kept.all():
            return self
        positions = np.repeat(kept, self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.lengths[kept])])
        return replace(
            self,
            ids=self.ids[positions],
            trained=self.trained[positions],
            offsets=offsets,
            rows=self.rows[kept],
            sides=self.sides[kept],
            shared=self.shared[kept],
            labels=self.labels[kept],
        )

    def hashes_of(self, rows: np.ndarray) -> np.ndarray:
        """Return a hash of all documents of each of ``rows``, uint64.

        A document's hash is splitmix64 of token and place, summed. An answer to another prompt does
        not count: it is not the row's.
        """
        starts = self.offsets[:-1]
        first_of = np.repeat(starts, self.lengths).astype(np.uint64)
        places = np.arange(len(self.ids), dtype=np.uint64) - first_of
        mixed = _splitmix(self.ids.astype(np.uint64) + places * np.uint64(0x9E3779B97F4A7C15))
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        hashes = _splitmix(
            running[self.offsets[1:]] - running[starts] + self.lengths.astype(np.uint64)
        )
        by_side = hashes * (2 * self.sides + 1).astype(np.uint64)
        by_side[(self.labels != UNJUDGED) & (self.sides == MISMATCHED_SIDE)] = 0
        row_numbers, first = np.unique(self.rows, return_index=True)
        if not len(first):
            return by_side
        return np.add.reduceat(by_side, first)[np.searchsorted(row_numbers, rows)]

    def inspect(self, marks: Marks, report: DataReport) -> None:
        """Count what the gate finds in tokens."""
        starts = self.offsets[:-1]
        lengths = self.lengths
        for row in np.unique(self.rows[lengths == 1]):
            report.note("single_token", int(row))
        longer = np.flatnonzero(lengths > 1)
        first = self.ids[starts[longer]]
        second = self.ids[starts[longer] + 1]
        doubled = (first == marks.bos) & (second == marks.bos)
        for row in np.unique(self.rows[longer[doubled]]):
            report.note("double_bos", int(row))
        padding = (self.trained == 1) & (self.ids == marks.pad)
        # Nothing predicts the first token, which may be a BOS that pads as well.
        padding[starts[lengths > 0]] = False
        stop = np.isin(self.ids, marks.stops)
        masked = np.zeros(len(self.ids), bool)
        masked[1:] = stop[1:] & (self.trained[1:] == 0) & (self.trained[:-1] == 1) & ~stop[:-1]
        masked[starts[lengths > 0]] = False
        for rule, broken in (("trained_padding", padding), ("masked_stop", masked)):
            documents = np.searchsorted(self.offsets, np.flatnonzero(broken), side="right") - 1
            for row in np.unique(self.rows[documents]):
                report.note(rule, int(row))


def share_prompt(item: list[DocumentPiece]) -> list[DocumentPiece]:
    """Return an item with the tokens that all begin with as a document of its own behind them.

    These tokens are not trained in any of the documents. Returns the item unchanged if there are
    too few of them.
    """
    first, *others = (piece.ids for piece in item)
    if not others:
        return item
    common = len(first)
    for other in others:
        common = min(common, len(other))
        differs = first[:common] != other[:common]
        if differs.any():
            common = int(np.argmax(differs))
    untrained = min(
        int(np.argmax(piece.trained)) if piece.trained.any() else len(piece.ids) for piece in item
    )
    # The token before the first that differs or is trained predicts it, so each answer needs it.
    shared = min(common, untrained) - 1
    if shared < MIN_SHARED_TOKENS:
        return item
    sides = [
        piece._replace(ids=piece.ids[shared:], trained=piece.trained[shared:], shared=shared)
        for piece in item
    ]
    prompt = item[0]._replace(
        side=len(item), ids=first[:shared], trained=item[0].trained[:shared], shared=IS_SHARED
    )
    return [*sides, prompt]


def fit_item(
    item: list[DocumentPiece], width: int, overlong: Overlong, report: DataReport
) -> list[DocumentPiece]:
    """Return a row's item in at most ``width`` tokens; what was done is counted.

    A row of one document may be split. Its pieces overlap by one token, so that every target keeps
    its place in exactly one of them. Of an item whose documents are together too long, the longest
    are cut to one length. A shared prompt is never cut; if it leaves no room for an answer, the
    item is dropped. An answer to another prompt gets the room that is left beside the judged one.

    Args:
        item: the documents of a row, a shared prompt last.
        width: most tokens of the item.
        overlong: what becomes of an item that is too long.
        report: counts what is split, cut or dropped.
    """
    if item[0].label != UNJUDGED:
        item = _judged_first(item, width, report)
    row = item[0].row
    ids = item[0].ids
    trained = item[0].trained
    total = sum(len(piece.ids) for piece in item)
    if total <= width:
        return item
    if overlong == "drop":
        report.note("dropped_row", row, f"{total:,} tokens")
        return []
    if overlong == "split" and width > 1 and len(item) == 1:
        report.note("split_row", row, f"{total:,} tokens")
        return [
            DocumentPiece(row, 0, ids[start : start + width], trained[start : start + width])
            for start in range(0, len(ids) - 1, width - 1)
        ]
    report.note("cut_row", row, f"{total:,} tokens")
    prompt = [piece for piece in item if piece.shared < 0]
    answers = [piece for piece in item if piece.shared >= 0]
    room = width - sum(len(piece.ids) for piece in prompt)
    if room < 2 * len(answers):
        report.note("masked_by_cut", row, f"a prompt of {width - room:,} tokens")
        return []
    # The most tokens that each answer may keep so that all fit together.
    length = room
    left = room
    for shorter, tokens in enumerate(sorted(len(piece.ids) for piece in answers)):
        length = left // (len(answers) - shorter)
        if tokens > length:
            break
        left -= tokens
    if any(piece.trained[length:].any() for piece in answers):
        report.note("cut_stop", row)
    cut = [
        piece._replace(ids=piece.ids[:length], trained=piece.trained[:length]) for piece in answers
    ]
    return [*cut, *prompt]


def _judged_first(item: list[DocumentPiece], width: int, report: DataReport) -> list[DocumentPiece]:
    """Return a judged answer whole, and as much of the answer to another prompt as fits.

    The other one keeps a target at least. If there is no room for that, the judged answer stands by
    itself, behind its prompt; if that is too long by itself, ``fit_item`` cuts the item.
    """
    other = next(piece for piece in item if piece.side == MISMATCHED_SIDE)
    up_to_target = int(np.argmax(other.trained[1:])) + 2
    room = width - sum(len(piece.ids) for piece in item if piece is not other)
    if len(other.ids) <= room:
        return item
    if 0 <= room < up_to_target:
        report.note("no_room_for_other", other.row, f"{width - room:,} tokens")
        judged = item[0]
        prompt = item[-1]
        if prompt.shared >= 0:
            return [judged]
        ids = np.concatenate((prompt.ids, judged.ids))
        trained = np.concatenate((prompt.trained, judged.trained))
        return [judged._replace(ids=ids, trained=trained, shared=0)]
    length = max(room, up_to_target)
    cut = other._replace(ids=other.ids[:length], trained=other.trained[:length])
    return [cut if piece is other else piece for piece in item]


def _splitmix(values: np.ndarray) -> np.ndarray:
    """Return SplitMix64's finalizer of uint64 values (Steele, Lea and Flood, 2014); it wraps."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
