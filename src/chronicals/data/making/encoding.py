"""Documents of chunks: rows are recognised, tokenised, fitted to the width and checked.

What a chunk becomes depends on nothing but its rows and the earlier ones that it holds, so any
process can make it. A row that cannot be used is left out and counted; the gate judges at the end.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from chronicals.config import Overlong
from chronicals.data.kinds.preferences import nearest_other_prompts
from chronicals.data.kinds.rows import PROMPT, ROW_KINDS, NormalRow
from chronicals.data.making.documents import (
    MISMATCHED_SIDE,
    UNJUDGED,
    DocumentPiece,
    FlatDocuments,
    Marks,
    fit_item,
    share_prompt,
)
from chronicals.data.making.recognition import RecognisedChunk, Recogniser
from chronicals.data.reading.gate import DataError, DataReport
from chronicals.data.reading.ledger import UNRECOGNISED
from chronicals.data.reading.records import CHUNK_ROWS, RowChunk
from chronicals.data.tokens.batch_encoding import BatchEncoder, TokenArrays
from chronicals.data.tokens.template import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk.

    Attributes:
        documents: each with something to train on.
        hashes: uint64 ``[documents]``, of the rows they came from.
        row_kinds: int8 ``[documents]``, of the rows they came from, as a token store numbers them.
        report: what was counted of these rows.
    """

    documents: FlatDocuments
    hashes: np.ndarray
    row_kinds: np.ndarray
    report: DataReport


class ChunkEncoder:
    """Makes documents of chunks.

    Args:
        tokenizer: from rows to tokens.
        width: most tokens of a document.
        overlong: what becomes of longer rows (None: texts are split, other rows cut).
        at_once: rows that the tokenizer gets at once; its threads share them, and it holds 20 kB
            for each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        width: int,
        overlong: Overlong | None = None,
        at_once: int = CHUNK_ROWS,
    ):
        self.tokenizer = tokenizer
        self.width = width
        self.overlong = overlong
        self.at_once = at_once
        self.marks = Marks.of(tokenizer)
        self.recogniser = Recogniser(tokenizer, self.marks.special)
        self.batch_encoder = BatchEncoder(tokenizer)

    def encoded(self, chunks: Iterable[RowChunk]) -> Iterator[tuple[RowChunk, Encoded]]:
        """Yield each chunk and its documents.

        While one chunk is tokenised, without the GIL, the next is read and recognised.
        """
        begun: deque[RecognisedChunk] = deque()

        def batches() -> Iterator[tuple[list[NormalRow], list[str]]]:
            for chunk in chunks:
                recognised = self.recogniser.recognised(chunk)
                begun.append(recognised)
                for start in range(0, max(len(recognised.drafts), 1), self.at_once):
                    drafts = recognised.drafts[start : start + self.at_once]
                    yield [draft.normal for draft in drafts], [draft.place for draft in drafts]

        tokens = list[TokenArrays | DataError]()
        for batch in self.batch_encoder.encode(batches()):
            tokens += batch
            if len(tokens) == len(begun[0].drafts):
                recognised = begun.popleft()
                yield recognised.chunk, self._checked(recognised, tokens)
                tokens = []

    def _checked(
        self, recognised: RecognisedChunk, tokens: list[TokenArrays | DataError]
    ) -> Encoded:
        """Return the documents, counted, without rows that were refused or hold no target."""
        if recognised.judged:
            tokens = self._with_other_answers(recognised, tokens)
        report = recognised.report
        read_pieces = list[DocumentPiece]()
        fitted_pieces = list[DocumentPiece]()
        for kind, item in _items(recognised, tokens):
            read_pieces += item
            fitted_pieces += self._fitted(kind, item, recognised)
        read = FlatDocuments.joined(read_pieces)
        unchanged = len(fitted_pieces) == len(read_pieces) and all(
            map(operator.is_, fitted_pieces, read_pieces)
        )
        fitted = read if unchanged else FlatDocuments.joined(fitted_pieces)
        read.inspect(self.marks, report)
        # An item stays if all its documents have targets; a shared prompt needs none.
        item_of = np.cumsum(fitted.sides == 0)
        untrained = (fitted.targets == 0) & (fitted.shared >= 0)
        if PROMPT in self.tokenizer.kinds:  # nothing of a prompt is trained
            untrained &= fitted.lengths == 0
        documents = fitted.only(~np.isin(item_of, item_of[untrained]))
        for row in np.setdiff1d(fitted.rows, documents.rows):
            lost_by_cut = read.targets[read.rows == row].min() > 0
            rule = "masked_by_cut" if lost_by_cut else "masked_row"
            recognised.left_out[int(row)] = rule
            report.note(rule, int(row))
        hashes = read.hashes_of(documents.rows)
        report.documents = len(documents)
        report.tokens = len(documents.ids)
        report.targets = int(documents.targets.sum())
        report.prompts = int((documents.shared < 0).sum())
        mismatched = (documents.sides == MISMATCHED_SIDE) & (documents.labels != UNJUDGED)
        report.mismatched = int(mismatched.sum())
        chunk = recognised.chunk
        # The rows are counted by kind, and by rule those that gave no document.
        left = {*documents.rows.tolist()}
        for row in range(chunk.first, chunk.first + len(chunk.records)):
            kind = recognised.row_kinds.get(row, UNRECOGNISED)
            report.kinds[kind] = report.kinds.get(kind, 0) + 1
            if row not in left:
                rules = report.left_out.setdefault(kind, {})
                rule = recognised.left_out[row]
                rules[rule] = rules.get(rule, 0) + 1
        # int8 [documents], as a token store numbers the kinds of the documents' rows.
        kinds = [ROW_KINDS.index(recognised.row_kinds[row]) for row in documents.rows.tolist()]
        row_kinds = np.array(kinds, np.int8)
        for finding in report.findings.values():
            finding.places = [chunk.places[row - 1 - chunk.first] for row in finding.rows]
            if not finding.example and finding.rows:
                finding.example = finding.places[0]
        return Encoded(documents, hashes, row_kinds, report)

    def _with_other_answers(
        self, recognised: RecognisedChunk, tokens: list[TokenArrays | DataError]
    ) -> list[TokenArrays | DataError]:
        """Return the tokens after unusable answers to other prompts are replaced.

        Such an answer is refused or holds no target. The row then gets the nearest usable one, or
        is left out if there is none.
        """
        drafts = recognised.drafts
        index = {(draft.row, draft.side): at for at, draft in enumerate(drafts)}
        has_target = [
            not isinstance(row_tokens, DataError) and bool(row_tokens[1].any())
            for row_tokens in tokens
        ]
        usable = [row for (row, side), at in index.items() if side == 0 and has_target[at]]
        wanting = {row for row in usable if not has_target[index[row, MISMATCHED_SIDE]]}
        if not wanting:
            return tokens
        others = nearest_other_prompts([recognised.judged[row] for row in usable])
        replaced = dict[int, NormalRow]()
        without_other = set[int]()
        for row, other in zip(usable, others, strict=True):
            if row not in wanting:
                continue
            at = index[row, MISMATCHED_SIDE]
            place = drafts[at].place
            if other is None:
                recognised.report.note("no_other_prompt", row, place)
                without_other.add(row)
            else:
                replaced[at] = self.recogniser.mismatched(recognised.judged[row], other, place)
        if replaced:
            places = [drafts[at].place for at in replaced]
            again = self.batch_encoder.encode_batch([*replaced.values()], places)
            for at, row_tokens in zip(replaced, again, strict=True):
                tokens[at] = row_tokens
        left = [
            row_tokens
            for draft, row_tokens in zip(drafts, tokens, strict=True)
            if draft.row not in without_other
        ]
        recognised.leave_out(without_other, "no_other_prompt")
        return left

    def _fitted(
        self, kind: str, item: list[DocumentPiece], recognised: RecognisedChunk
    ) -> list[DocumentPiece]:
        """Return a row's item in at most the width, or the pieces of a text.

        A pair of equal answers gives nothing: there is no difference to train on.
        """
        row = item[0].row
        if kind == PROMPT:
            if len(item[0].ids) <= self.width:
                return item
            recognised.report.note("no_room", row, f"{len(item[0].ids):,} tokens")
            recognised.left_out[row] = "no_room"
            return []
        whole = kind != "text" and self.tokenizer.train_on == "answers"
        overlong = self.overlong or ("cut" if whole else "split")
        fitted = fit_item(share_prompt(item), self.width, overlong, recognised.report)
        if not fitted:
            recognised.left_out[row] = "dropped_row" if overlong == "drop" else "masked_by_cut"
        answers = [piece.ids for piece in fitted if piece.shared >= 0]
        equal = len(answers) > 1 and all(np.array_equal(answers[0], ids) for ids in answers[1:])
        if equal and len(item) > 1 and item[0].label == UNJUDGED:
            recognised.report.note("identical_answers", row)
            recognised.left_out[row] = "identical_answers"
            return []
        return fitted


def _items(
    recognised: RecognisedChunk, tokens: list[TokenArrays | DataError]
) -> list[tuple[str, list[DocumentPiece]]]:
    """Return the kind and the documents of each row; refused rows are counted and left out."""
    items = dict[int, tuple[str, list[DocumentPiece]]]()
    refused = dict[int, DataError]()
    for draft, row_tokens in zip(recognised.drafts, tokens, strict=True):
        row = draft.row
        if isinstance(row_tokens, DataError):
            refused.setdefault(row, row_tokens)
        else:
            label = recognised.labels.get(row, UNJUDGED)
            piece = DocumentPiece(row, draft.side, *row_tokens, label=label)
            items.setdefault(row, (draft.normal.kind, []))[1].append(piece)
    for row, error in refused.items():
        recognised.report.note(error.rule, row, str(error))
        recognised.left_out[row] = error.rule
        items.pop(row, None)
    return [*items.values()]
