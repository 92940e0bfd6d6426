"""Documents in flat arrays: rows fitted to the width, and what the gate can see in their tokens,
many at a time.

Shapes: T tokens of N documents together; document n holds the positions ``offsets[n]`` to
``offsets[n + 1]``.
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


@dataclass(frozen=True)
class Marks:
    """The tokens of a vocabulary that the gate looks for.

    Attributes:
        bos, pad: ids, -1 where there is none (for ``pad`` also where it is one of ``stops``).
        stops: ids at which an answer ends.
        special: finds the writing of a special token in a text.
    """

    bos: int
    pad: int
    stops: tuple[int, ...]
    special: re.Pattern[str] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks:
        inner = tokenizer.tokenizer
        stops = {inner.eos_token_id} - {None}
        if inner.chat_template is not None:
            with contextlib.suppress(
                TemplateError
            ):  # every conversation will be refused with the reason
                stops.add(tokenizer.stop_token())
        names = {
            str(token) for token in inner.added_tokens_decoder.values() if token.special
        } | set(inner.all_special_tokens)
        written = sorted((re.escape(name) for name in names if len(name) > 1), reverse=True)
        bos = -1 if inner.bos_token_id is None else inner.bos_token_id
        pad = (
            -1 if inner.pad_token_id is None or inner.pad_token_id in stops else inner.pad_token_id
        )
        return cls(bos, pad, tuple(stops), re.compile("|".join(written)) if written else None)


UNJUDGED = -1
"""Label of a row that says nothing about its answer."""

MISMATCHED = 1
"""Side of an answer to another prompt beside a judged one."""


class Piece(NamedTuple):
    """A document by itself: the row it is from, its place in its item, token ids, for each
    whether it is trained, what the column ``shared`` says (``shared_prompts.py``), and the row's
    ``label``: 1 good, 0 bad, -1 where it has none."""

    row: int
    side: int
    ids: np.ndarray
    trained: np.ndarray
    shared: int = 0
    label: int = UNJUDGED


@dataclass(frozen=True)
class Documents:
    """Several documents end to end.

    Attributes:
        ids: int32 ``[T]``.
        trained: uint8 ``[T]``, 1 where the token is trained.
        offsets: int64 ``[N + 1]``.
        rows: int64 ``[N]``, the row each came from, from 0 in reading order.
        sides: int64 ``[N]``, the place of each in its item, which begins at each 0.
        shared: int64 ``[N]``, tokens of the item's last document that stand before it; -1 for that
            document.
        labels: int64 ``[N]``, 1 where the row calls its answer good, 0 where bad, -1 where it says
            nothing.
    """

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    sides: np.ndarray
    shared: np.ndarray
    labels: np.ndarray

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Documents:
        ids = np.concatenate([piece.ids for piece in pieces] or [np.zeros(0, np.int32)])
        trained = np.concatenate([piece.trained for piece in pieces] or [np.zeros(0, np.uint8)])
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece.ids) for piece in pieces], out=offsets[1:])
        rows, sides, shared, labels = (
            np.array([piece[at] for piece in pieces], np.int64) for at in (0, 1, 4, 5)
        )
        return cls(ids, trained, offsets, rows, sides, shared, labels)

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """int64 ``[N]``: positions that predict a trained token; the first token of a document
        is predicted by none.
        """
        running = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        filled = self.lengths > 0
        first = np.where(
            filled, self.trained[np.minimum(self.offsets[:-1], max(len(self.trained) - 1, 0))], 0
        )
        return running[self.offsets[1:]] - running[self.offsets[:-1]] - first

    @property
    def prompts(self) -> int:
        """How many are prompts that the answers of an item share."""
        return int((self.shared < 0).sum())

    @property
    def mismatched(self) -> int:
        """How many are answers to another prompt, beside judged ones."""
        return int(((self.sides == MISMATCHED) & (self.labels != UNJUDGED)).sum())

    def trained_items(self) -> Documents:
        """Without the items of which a document has no target; a shared prompt has none."""
        item = np.cumsum(self.sides == 0)
        return self.only(~np.isin(item, item[(self.targets == 0) & (self.shared >= 0)]))

    def only(self, kept: np.ndarray) -> Documents:
        """Those where ``kept`` (bool ``[N]``) holds."""
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

    def hashes(self) -> np.ndarray:
        """uint64 ``[N]``: the same where all tokens are the same (splitmix64 of token and place,
        summed).
        """
        starts = self.offsets[:-1]
        places = np.arange(len(self.ids), dtype=np.uint64) - np.repeat(starts, self.lengths).astype(
            np.uint64
        )
        mixed = _splitmix(self.ids.astype(np.uint64) + places * np.uint64(0x9E3779B97F4A7C15))
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        return _splitmix(
            running[self.offsets[1:]] - running[starts] + self.lengths.astype(np.uint64)
        )

    def hashes_of(self, rows: np.ndarray) -> np.ndarray:
        """uint64, for each of ``rows`` the same where all tokens of all its documents are the
        same; an answer to another prompt is not the row's."""
        known, first = np.unique(self.rows, return_index=True)
        by_side = self.hashes() * (2 * self.sides + 1).astype(np.uint64)
        by_side[(self.labels != UNJUDGED) & (self.sides == MISMATCHED)] = 0
        return (
            np.add.reduceat(by_side, first)[np.searchsorted(known, rows)] if len(first) else by_side
        )

    def inspect(self, marks: Marks, report: DataReport) -> None:
        """Count what the gate finds in tokens."""
        starts = self.offsets[:-1]
        lengths = self.lengths
        for row in np.unique(self.rows[lengths == 1]):
            report.note("single_token", int(row))
        longer = np.flatnonzero(lengths > 1)
        doubled = (self.ids[starts[longer]] == marks.bos) & (
            self.ids[starts[longer] + 1] == marks.bos
        )
        for row in np.unique(self.rows[longer[doubled]]):
            report.note("double_bos", int(row))
        padding = (self.trained == 1) & (self.ids == marks.pad)
        padding[starts[lengths > 0]] = (
            False  # which nothing predicts, and where a BOS that pads as well stands
        )
        self._note_positions("trained_padding", padding, report)
        stop = np.isin(self.ids, marks.stops)
        masked = np.zeros(len(self.ids), bool)
        masked[1:] = stop[1:] & (self.trained[1:] == 0) & (self.trained[:-1] == 1) & ~stop[:-1]
        masked[starts[lengths > 0]] = False
        self._note_positions("masked_stop", masked, report)

    def _note_positions(self, rule: str, found: np.ndarray, report: DataReport) -> None:
        """Count the rows that hold a position where ``found`` (bool ``[T]``)."""
        documents = np.searchsorted(self.offsets, np.flatnonzero(found), side="right") - 1
        for row in np.unique(self.rows[documents]):
            report.note(rule, int(row))


def fit(item: list[Piece], width: int, overlong: Overlong, report: DataReport) -> list[Piece]:
    """A row's item, or the documents that a row without company is split into, in at most ``width``
    tokens; what was done is counted.

    Pieces of a split row overlap by one token, so that every target keeps its place in exactly one
    of them. Of an item whose documents are together too long, the longest are cut to one length; a
    shared prompt is never cut, and an item is dropped where it leaves no room for an answer. An
    answer to another prompt has what room is left beside the judged one, or goes.
    """
    if item[0].label != UNJUDGED:
        item = _judged_first(item, width, report)
    row, _, ids, trained, *_ = item[0]
    total = sum(len(piece.ids) for piece in item)
    if total <= width:
        return item
    if overlong == "drop":
        report.note("dropped_row", row, f"{total:,} tokens")
        return []
    if overlong == "split" and width > 1 and len(item) == 1:
        report.note("split_row", row, f"{total:,} tokens")
        return [
            Piece(row, 0, ids[i : i + width], trained[i : i + width])
            for i in range(0, len(ids) - 1, width - 1)
        ]
    report.note("cut_row", row, f"{total:,} tokens")
    prompt = [piece for piece in item if piece.shared < 0]
    answers = [piece for piece in item if piece.shared >= 0]
    room = width - sum(len(piece.ids) for piece in prompt)
    if room < 2 * len(answers):
        report.note("masked_by_cut", row, f"a prompt of {width - room:,} tokens")
        return []
    most = _common_length([len(piece.ids) for piece in answers], room)
    if any(piece.trained[most:].any() for piece in answers):
        report.note("cut_stop", row)
    return [
        *(piece._replace(ids=piece.ids[:most], trained=piece.trained[:most]) for piece in answers),
        *prompt,
    ]


def _judged_first(item: list[Piece], width: int, report: DataReport) -> list[Piece]:
    """A judged answer as it is; of the one to another prompt, which is not trained, what fits
    beside it, a target at least. Where there is no room for that the judged one stands alone,
    unless it is too long by itself, and cut in any case."""
    other = next(piece for piece in item if piece.side == MISMATCHED)
    least = int(np.argmax(other.trained[1:])) + 2
    room = width - sum(len(piece.ids) for piece in item if piece is not other)
    if len(other.ids) <= room:
        return item
    if 0 <= room < least:
        report.note("no_room_for_other", other.row, f"{width - room:,} tokens")
        return [_with_prompt(item)]
    most = max(room, least)
    cut = other._replace(ids=other.ids[:most], trained=other.trained[:most])
    return [cut if piece is other else piece for piece in item]


def _with_prompt(item: list[Piece]) -> Piece:
    """The first document of an item, behind the prompt where it is shared."""
    first = item[0]
    last = item[-1]
    if last.shared >= 0:
        return first
    ids, trained = (
        np.concatenate(both) for both in ((last.ids, first.ids), (last.trained, first.trained))
    )
    return first._replace(ids=ids, trained=trained, shared=0)


def are_identical(item: Sequence[Piece]) -> bool:
    """Whether there are several answers, and all have the same tokens."""
    answers = [piece.ids for piece in item if piece.shared >= 0]
    return len(answers) > 1 and all(np.array_equal(answers[0], other) for other in answers[1:])


def _common_length(lengths: list[int], width: int) -> int:
    """The most tokens that each document may keep so that all of them have ``width`` together."""
    left = width
    most = width
    for done, length in enumerate(sorted(lengths)):
        most = left // (len(lengths) - done)
        if length > most:
            break
        left -= length
    return most


def _splitmix(values: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood (2014), the finalizer of SplitMix64; uint64, wraps."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
