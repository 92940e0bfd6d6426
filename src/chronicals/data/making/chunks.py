"""Chunks of rows, and the documents they become: recognised, tokenised, fitted and checked, each
chunk by itself.

What a chunk gives depends on nothing but its rows and those it has from before them, so that it may
be made in any process. A row that cannot be used is left out and counted; the gate judges at the
end.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np

from chronicals.config import Overlong
from chronicals.data.kinds.json_fields import refuse_printed_messages, with_conversations
from chronicals.data.kinds.judged_answers import (
    JUDGED,
    judged_completion,
    label_of,
    nearest_other_prompts,
    with_answer_of,
)
from chronicals.data.kinds.messages import check_answers, conversation_oddities, refuse_media
from chronicals.data.kinds.preferences import PREFERENCE, SIDES, sides_of
from chronicals.data.kinds.rows import (
    DOCUMENT_KINDS,
    ROW_KINDS,
    NormalRow,
    as_instruction,
    kind_of,
    known_kind,
    pair_of,
    plain_row,
    texts_of,
    unread_fields,
)
from chronicals.data.kinds.unusable_rows import refuse_halves, refuse_other_kind
from chronicals.data.making.documents import UNJUDGED, Documents, Marks, Piece, are_identical, fit
from chronicals.data.making.shared_prompts import share_prompt
from chronicals.data.reading.gate import DataError, DataReport
from chronicals.data.reading.ledger import UNRECOGNISED
from chronicals.data.reading.records import BadRow, Line, Record, Unparsed, parsed
from chronicals.data.tokens.batch_encoding import BatchEncoder, TokenArrays
from chronicals.data.tokens.conversation import chosen, messages_of
from chronicals.data.tokens.template import Tokenizer

CHUNK_ROWS = 512
CHUNK_LETTERS = 1 << 22
"""A chunk ends at so many rows, or at so many letters or given ids."""

SEVERAL = 3
"""Words of a prompt from which on an answer that begins with it repeats it, and is no greeting
that is returned.
"""


@dataclass(frozen=True)
class Chunk:
    """Rows that follow each other, as they were read.

    Attributes:
        first: number of the first, from 0.
        wheres: what errors call each.
        letters: in all of them, about.
        earlier: some that were read before the first, the last ones.
    """

    first: int
    wheres: list[str] = field(default_factory=list)
    records: list[Record | BadRow | Line] = field(default_factory=list)
    letters: int = 0
    earlier: list[Record | BadRow | Line] = field(default_factory=list)


def chunks_of(rows: Iterable[Unparsed], earlier: int = 0) -> Iterator[Chunk]:
    """The rows in chunks.

    Args:
        earlier: how many rows before it a chunk has.
    """
    first = 0
    letters = 0
    wheres = list[str]()
    records = list[Record | BadRow | Line]()
    before = deque[Record | BadRow | Line](maxlen=earlier)
    for where, record in rows:
        wheres.append(where)
        records.append(record)
        letters += _letters(record)
        if len(records) == CHUNK_ROWS or letters >= CHUNK_LETTERS:
            yield Chunk(first, wheres, records, letters, [*before])
            before.extend(records)
            first = first + len(records)
            letters = 0
            wheres = []
            records = []
    if records:
        yield Chunk(first, wheres, records, letters, [*before])


def _letters(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_letters, value.values()))
    if isinstance(value, (list, tuple)):
        return (
            len(value) if not value or isinstance(value[0], Number) else sum(map(_letters, value))
        )
    return math.prod(getattr(value, "shape", ()))


@dataclass(frozen=True)
class Encoded:
    """What a chunk's rows became.

    Attributes:
        documents: each with something to train on.
        hashes: uint64 ``[documents]``, of the rows they came from.
        row_kinds: int8 ``[documents]``, of the rows they came from, as a token store numbers them.
        report: what was counted of these rows.
    """

    documents: Documents
    hashes: np.ndarray
    row_kinds: np.ndarray
    report: DataReport


@dataclass
class _Recognised:
    """The rows of a chunk that the tokenizer is given.

    Attributes:
        row_kinds: of every row of the chunk that has one.
        left_out: the gate's rule for which a row goes, of those that do.
    """

    chunk: Chunk
    report: DataReport
    rows: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    wheres: list[str] = field(default_factory=list)
    normal: list[NormalRow] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    judged: dict[int, Record] = field(default_factory=dict)
    row_kinds: dict[int, str] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)

    def add(self, row: int, side: int, where: str, normal: NormalRow) -> None:
        self.rows.append(row)
        self.sides.append(side)
        self.wheres.append(where)
        self.normal.append(normal)

    def leave_out(self, rows: set[int], rule: str) -> None:
        self.left_out |= dict.fromkeys(rows, rule)
        kept = (
            [at for at, row in enumerate(self.rows) if row not in rows]
            if rows
            else range(len(self.rows))
        )
        self.rows = [self.rows[at] for at in kept]
        self.sides = [self.sides[at] for at in kept]
        self.wheres = [self.wheres[at] for at in kept]
        self.normal = [self.normal[at] for at in kept]


@dataclass
class _RowReport:
    """Counts what is said of a row's documents: every rule once, and the kind of the first one
    as the row's.
    """

    report: DataReport
    row: int
    rules: set[str] = field(default_factory=set)
    kind: str | None = None

    def note(self, rule: str, example: str) -> None:
        if rule not in self.rules:
            self.rules.add(rule)
            self.report.note(rule, self.row, example)

    def take_kind(self, kind: str) -> None:
        if self.kind is None:
            self.kind = kind
            self.report.forms[kind] = self.report.forms.get(kind, 0) + 1


@dataclass
class ChunkEncoder:
    """Makes documents of chunks.

    Args:
        width: most tokens of a document.
        overlong: what becomes of longer rows (None: texts are split, other rows cut).
        at_once: rows of a chunk that the tokenizer is given at once; its threads share them, and it
            holds 20 kB for each.
    """

    tokenizer: Tokenizer
    width: int
    overlong: Overlong | None = None
    at_once: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        self.marks = Marks.of(self.tokenizer)
        self.rows = BatchEncoder(self.tokenizer)
        self.beyond = self.tokenizer.kinds - {*DOCUMENT_KINDS}

    def encoded(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Each chunk and what it became; while one is tokenised, without the GIL, the next is
        taken and recognised.
        """
        begun: deque[_Recognised] = deque()

        def batches() -> Iterator[tuple[list[NormalRow], list[str]]]:
            for chunk in chunks:
                found = self._recognised(chunk)
                begun.append(found)
                for start in range(0, max(len(found.rows), 1), self.at_once):
                    rows = slice(start, start + self.at_once)
                    yield found.normal[rows], found.wheres[rows]

        tokens = list[TokenArrays | DataError]()
        for some in self.rows.encode(batches()):
            tokens += some
            if len(tokens) == len(begun[0].rows):
                yield begun[0].chunk, self._checked(begun.popleft(), tokens)
                tokens = []

    def _recognised(self, chunk: Chunk) -> _Recognised:
        found = _Recognised(
            chunk,
            DataReport(
                rows=len(chunk.records), answers=self.tokenizer.kinds.isdisjoint(DOCUMENT_KINDS)
            ),
        )
        for row, (where, record) in enumerate(
            zip(chunk.wheres, chunk.records, strict=True), chunk.first
        ):
            try:
                documents = self._documents(row, parsed(record), where, found)
            except DataError as fault:
                found.report.note(fault.rule, row, str(fault))
                found.left_out[row] = fault.rule
                continue
            self._inspect(row, documents, where, found.report)
            for side, normal in enumerate(documents):
                found.add(row, side, where, normal)
        if JUDGED in self.tokenizer.kinds:
            self._add_mismatched(found)
        return found

    def _add_mismatched(self, found: _Recognised) -> None:
        """To every judged answer a document more: its prompt with the answer to another one;
        rows without such go.
        """
        wheres = dict(zip(found.rows, found.wheres, strict=True))
        others = nearest_other_prompts(
            [found.judged[row] for row in wheres], [*self._judged_before(found.chunk)]
        )
        alone = set[int]()
        for (row, where), other in zip(wheres.items(), others, strict=True):
            if other is None:
                found.report.note("no_other_prompt", row, where)
                alone.add(row)
                continue
            found.add(row, 1, where, self._mismatched(found.judged[row], other, where))
        found.leave_out(alone, "no_other_prompt")

    def _mismatched(self, own: Record, other: Record, where: str) -> NormalRow:
        mismatched = with_answer_of(own, other)
        kind = kind_of(mismatched, where)
        if kind == "completion" and self.tokenizer.completions_as_chat:
            kind = "instruction"
            mismatched = as_instruction(mismatched)
        return NormalRow.of(mismatched, kind, where)

    def _with_other_answers(
        self, found: _Recognised, encoded: list[TokenArrays | DataError]
    ) -> list[TokenArrays | DataError]:
        """The tokens; a row that was given the answer of one that is refused or holds no target
        has another one's now, or goes where there is none."""
        places = {key: at for at, key in enumerate(zip(found.rows, found.sides, strict=True))}
        good = [
            row for row, side in places if side == 0 and _has_target(encoded[places[row, side]])
        ]
        wanting = {row for row in good if not _has_target(encoded[places[row, 1]])}
        if not wanting:
            return encoded
        others = zip(good, nearest_other_prompts([found.judged[row] for row in good]), strict=True)
        given = dict[int, NormalRow]()
        alone = set[int]()
        for row, other in others:
            if row not in wanting:
                continue
            at = places[row, 1]
            if other is None:
                found.report.note("no_other_prompt", row, found.wheres[at])
                alone.add(row)
            else:
                given[at] = self._mismatched(found.judged[row], other, found.wheres[at])
        if given:
            again = self.rows.encode_batch([*given.values()], [found.wheres[at] for at in given])
            for at, tokens in zip(given, again, strict=True):
                encoded[at] = tokens
        kept = [tokens for row, tokens in zip(found.rows, encoded, strict=True) if row not in alone]
        found.leave_out(alone, "no_other_prompt")
        return kept

    def _judged_before(self, chunk: Chunk) -> Iterator[Record]:
        """Of the rows before a chunk those that can be used."""
        before = _Recognised(chunk, DataReport())
        for row, record in enumerate(map(parsed, chunk.earlier)):
            with suppress(DataError):
                self._documents(row, record, "", before)
                yield before.judged[row]

    def _documents(
        self, row: int, record: Record | BadRow, where: str, found: _Recognised
    ) -> list[NormalRow]:
        """What a row's documents are made of; counts what is odd in it."""
        if isinstance(record, BadRow):
            raise DataError(f"{where}: {record.reason}", record.rule)
        record = plain_row(with_conversations(record), where)
        kind = known_kind(record, self.beyond)
        if kind is not None:
            found.row_kinds[row] = kind
        refuse_media(record, where)
        refuse_printed_messages(record, where)
        kinds = self.tokenizer.kinds
        refuse_halves(record, where, kinds)
        kind = kind_of(record, where, self.beyond)
        if kind not in kinds:
            refuse_other_kind(kind, record, where, kinds)
        counted = _RowReport(found.report, row)

        def tell(name: str) -> None:
            counted.note("columns_recognised", f"{where}: {name} is the prompt")

        if kind == PREFERENCE and kind in kinds:
            sides = zip(SIDES, sides_of(record, where, tell), strict=True)
            return [
                self._normal(kind_of(side, where), side, f"{where} ({name})", counted)
                for name, side in sides
            ]
        if kind == JUDGED and kind in kinds:
            found.labels[row] = label_of(record, where)
            record = found.judged[row] = judged_completion(record, where, tell)
            kind = kind_of(record, where)
        return [self._normal(kind, record, where, counted)]

    def _normal(self, kind: str, record: Record, where: str, counted: _RowReport) -> NormalRow:
        """One of the documents of a row."""
        if kind == "completion":
            kind, record = self._completion(record, where, counted)
        counted.take_kind(kind)
        for name in unread_fields(record, kind):
            counted.note("unread_field", f"{where}: {name}")
        normal = NormalRow.of(record, kind, where)
        if self.tokenizer.train_on == "answers":
            self._check_answers(normal, where, counted)
            if kind == "completion" and self.tokenizer.tokenizer.chat_template is not None:
                counted.note("plain_completion", where)
            if kind == "completion" and _repeats(normal.record):
                counted.note("repeated_prompt", where)
        return normal

    def _completion(self, record: Record, where: str, counted: _RowReport) -> tuple[str, Record]:
        """A plain completion, as an instruction if it is to go through the chat template; counts
        other names of its fields.
        """
        if (pair := pair_of(record)) is not None and pair[0] != "prompt":
            counted.note(
                "columns_recognised", f"{where}: {pair[0]} is the prompt, {pair[1]} the completion"
            )
        if self.tokenizer.completions_as_chat:
            return "instruction", as_instruction(record)
        return "completion", record

    def _check_answers(self, normal: NormalRow, where: str, counted: _RowReport) -> None:
        """Raise where a row teaches to say nothing, or has nobody who says it; count what is
        odd.
        """
        kind, record = normal
        if (
            kind == "completion"
            and isinstance(record["completion"], str)
            and not record["completion"].strip()
        ):
            raise DataError(f"{where}: completion is empty", "empty_answer")
        if kind != "chat":
            return
        messages, prompt = messages_of(record)
        roles = self.tokenizer.train_on_roles
        turns = self.tokenizer.train_on_turns
        if not check_answers(messages, prompt, where) and not chosen(
            messages, prompt, roles, turns, where
        ):
            raise DataError(
                f"{where}: no message of the assistant among {len(messages) - prompt}",
                "no_assistant_turn",
            )
        for rule in conversation_oddities(messages):
            counted.note(rule, where)

    def _inspect(
        self, row: int, documents: list[NormalRow], where: str, report: DataReport
    ) -> None:
        """Count what the gate finds in what people wrote."""
        texts = [text for normal in documents for text in texts_of(normal.record)]
        if documents[0].kind == "text" and sum(map(len, texts)) == 1:
            report.note("single_token", row, where)
        garbled = False
        written = None
        for text in texts:
            garbled = garbled or "\ufffd" in text
            written = written or (self.marks.special and self.marks.special.search(text))
        if garbled:
            report.note("byte_garbage", row, where)
        if written:
            report.note("special_token_in_text", row, f"{where} holds {written.group()!r}")

    def _checked(self, found: _Recognised, encoded: list[TokenArrays | DataError]) -> Encoded:
        """The documents, counted; rows that were refused or hold no target are left out."""
        if found.judged:
            encoded = self._with_other_answers(found, encoded)
        items = dict[int, tuple[str, list[Piece]]]()
        report = found.report
        refused = dict[int, DataError]()
        for row, side, normal, tokens in zip(
            found.rows, found.sides, found.normal, encoded, strict=True
        ):
            if isinstance(tokens, DataError):
                refused.setdefault(row, tokens)
            else:
                piece = Piece(row, side, *tokens, label=found.labels.get(row, UNJUDGED))
                items.setdefault(row, (normal.kind, []))[1].append(piece)
        for row, error in refused.items():
            report.note(error.rule, row, str(error))
            found.left_out[row] = error.rule
            items.pop(row, None)
        whole = [piece for _, item in items.values() for piece in item]
        pieces = [
            piece for kind, item in items.values() for piece in self._fitted(kind, item, found)
        ]
        read = Documents.joined(whole)
        fitted = (
            read
            if len(pieces) == len(whole) and all(map(operator.is_, pieces, whole))
            else Documents.joined(pieces)
        )
        read.inspect(self.marks, report)
        kept = fitted.trained_items()
        for row in np.setdiff1d(fitted.rows, kept.rows):
            lost = read.targets[read.rows == row].min() > 0
            found.left_out[int(row)] = "masked_by_cut" if lost else "masked_row"
            report.note(found.left_out[int(row)], int(row))
        hashes = read.hashes_of(kept.rows)
        report.documents = len(kept)
        report.tokens = len(kept.ids)
        report.targets = int(kept.targets.sum())
        report.prompts = kept.prompts
        report.mismatched = kept.mismatched
        row_kinds = _row_kinds(found, kept)
        for finding in report.findings.values():
            if not finding.example and finding.rows:
                finding.example = found.chunk.wheres[finding.rows[0] - 1 - found.chunk.first]
            finding.places = [
                found.chunk.wheres[row - 1 - found.chunk.first] for row in finding.rows
            ]
        return Encoded(kept, hashes, row_kinds, report)

    def _fitted(self, kind: str, item: list[Piece], found: _Recognised) -> list[Piece]:
        """A row's item in documents of at most the width together, or the pieces of a text;
        nothing of a pair without a difference."""
        whole = kind != "text" and self.tokenizer.train_on == "answers"
        row = item[0].row
        overlong = self.overlong or ("cut" if whole else "split")
        fitted = fit(share_prompt(item), self.width, overlong, found.report)
        if not fitted:
            found.left_out[row] = "dropped_row" if overlong == "drop" else "masked_by_cut"
        if len(item) > 1 and item[0].label == UNJUDGED and are_identical(fitted):
            found.report.note("identical_answers", row)
            found.left_out[row] = "identical_answers"
            return []
        return fitted


def _row_kinds(found: _Recognised, kept: Documents) -> np.ndarray:
    """Count the rows of a chunk by kind, and by cause those that gave no document; return the
    kinds of the documents' rows.
    """
    report = found.report
    there = {*kept.rows.tolist()}
    for row in range(found.chunk.first, found.chunk.first + len(found.chunk.records)):
        kind = found.row_kinds.get(row, UNRECOGNISED)
        report.kinds[kind] = report.kinds.get(kind, 0) + 1
        if row not in there:
            causes = report.left_out.setdefault(kind, {})
            rule = found.left_out[row]
            causes[rule] = causes.get(rule, 0) + 1
    return np.array([ROW_KINDS.index(found.row_kinds[row]) for row in kept.rows.tolist()], np.int8)


def _repeats(record: Record) -> bool:
    """Whether the completion, a text, begins with the prompt, of several words; a greeting may
    well be greeted back.
    """
    prompt = record["prompt"]
    completion = record["completion"]
    both = isinstance(prompt, str) and isinstance(completion, str)
    return both and completion.startswith(prompt) and len(prompt.split(None, SEVERAL)) >= SEVERAL


def _has_target(tokens: TokenArrays | DataError) -> bool:
    return not isinstance(tokens, DataError) and bool(tokens[1].any())
