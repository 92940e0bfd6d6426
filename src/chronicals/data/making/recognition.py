"""Recognition: what the rows of a chunk are, and the documents they are to become.

A row that cannot be used is left out, and counted under one of the gate's rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from chronicals.data.kinds.messages import (
    check_answers,
    conversation_oddities,
    refuse_media,
    refuse_printed_messages,
    with_conversations,
)
from chronicals.data.kinds.preferences import (
    JUDGED,
    PAIR_FIELDS,
    PREFERENCE,
    RANKED_ANSWERS,
    RANKED_SCORES,
    in_one_form,
    judged_completion,
    label_of,
    nearest_other_prompts,
    sides_of,
)
from chronicals.data.kinds.rows import (
    DOCUMENT_KINDS,
    EXPECTED_FIELDS,
    PROMPT,
    NormalRow,
    as_instruction,
    kind_of,
    kind_with,
    known_kind,
    non_null_fields,
    normal_prompt,
    normalise,
    pair_of,
    plain_row,
    texts_of,
    unread_fields,
)
from chronicals.data.making.documents import MISMATCHED_SIDE
from chronicals.data.reading.gate import DataError, DataReport
from chronicals.data.reading.plain_values import is_object
from chronicals.data.reading.records import BadRow, RowChunk, RowRecord, parsed
from chronicals.data.tokens.conversation import messages_of, trained_messages
from chronicals.data.tokens.template import Tokenizer

REPEATED_PROMPT_WORDS = 3
"""Shortest prompt, in words, whose repetition in a completion is reported.

A completion that begins with a shorter prompt may be a returned greeting.
"""

_FIELDS_OF_PAIRS = (
    (PAIR_FIELDS, "a pair is of both"),
    (
        (RANKED_ANSWERS, RANKED_SCORES),
        "a ranked list is of both, with one number for each answer",
    ),
)
"""Two fields that make a pair, and the words of the error if one stands alone."""

_OTHER_OBJECTIVES = {
    (PREFERENCE, JUDGED): (
        "holds a judged answer (one answer and its label); take objective='kto' for these, or give "
        "both a chosen and a rejected answer to each prompt"
    ),
    (PREFERENCE, "prompt"): (
        "holds a prompt without answers; where other columns hold them, map them: "
        "columns={'chosen': 'THEIR_BETTER', 'rejected': 'THEIR_WORSE'}"
    ),
    (JUDGED, PREFERENCE): (
        "holds a preference pair; take an objective of pairs for these (objective='dpo', say), or "
        "make "
        "two rows of it, the chosen answer as completion with label true and the rejected one with "
        "label false"
    ),
    (JUDGED, "prompt"): (
        "holds a prompt without an answer; where other columns hold it and its label, map them: "
        "columns={'completion': 'THEIR_ANSWER', 'label': 'THEIR_LABEL'}"
    ),
}
"""Error text by (kind that the objective takes, kind of the row): what the row is, and what to do.
"""


class Draft(NamedTuple):
    """A document before it is tokenised.

    Attributes:
        row: number of its row, from 0 in reading order.
        side: its place in the row's item.
        place: where the row was read, as errors call it.
        normal: what is tokenised.
    """

    row: int
    side: int
    place: str
    normal: NormalRow


@dataclass
class RecognisedChunk:
    """The documents that a chunk is to become.

    Attributes:
        chunk: the rows.
        report: what was counted of them so far.
        drafts: the documents.
        labels: of judged rows, by number of row: 1 good, 0 bad.
        judged: judged rows as prompt and completion, by number of row.
        row_kinds: by number of row, for all rows that are of a kind.
        left_out: by number of row, the gate's rule for which it is left out.
    """

    chunk: RowChunk
    report: DataReport
    drafts: list[Draft] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    judged: dict[int, RowRecord] = field(default_factory=dict)
    row_kinds: dict[int, str] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)

    def leave_out(self, rows: set[int], rule: str) -> None:
        """Drop the documents of ``rows``."""
        self.left_out |= dict.fromkeys(rows, rule)
        self.drafts = [draft for draft in self.drafts if draft.row not in rows]


@dataclass
class _RowFindings:
    """Counts findings in the documents of a row: each rule once, and the first document's kind."""

    report: DataReport
    row: int
    rules: set[str] = field(default_factory=set)
    kind: str | None = None

    def note(self, rule: str, example: str) -> None:
        if rule not in self.rules:
            self.rules.add(rule)
            self.report.note(rule, self.row, example)


class Recogniser:
    """Recognises rows for one objective.

    Args:
        tokenizer: says which kinds the objective takes and what it trains.
        special_tokens: finds the writing of a special token in a text; None if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: re.Pattern[str] | None):
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.requested = tokenizer.kinds - {*DOCUMENT_KINDS}

    def recognised(self, chunk: RowChunk) -> RecognisedChunk:
        """Return the documents that a chunk is to become; its faults are counted."""
        report = DataReport(
            rows=len(chunk.records), answers=self.tokenizer.kinds.isdisjoint(DOCUMENT_KINDS)
        )
        recognised = RecognisedChunk(chunk, report)
        rows = zip(chunk.places, chunk.records, strict=True)
        for row, (place, record) in enumerate(rows, chunk.first):
            try:
                documents = self._documents(row, parsed(record), place, recognised)
            except DataError as fault:
                report.note(fault.rule, row, str(fault))
                recognised.left_out[row] = fault.rule
                continue
            # What the gate finds in what people wrote.
            texts = [text for normal in documents for text in texts_of(normal.record)]
            if documents[0].kind == "text" and sum(map(len, texts)) == 1:
                report.note("single_token", row, place)
            if any("\ufffd" in text for text in texts):
                report.note("byte_garbage", row, place)
            for text in texts:
                written = self.special_tokens and self.special_tokens.search(text)
                if written:
                    report.note("special_token_in_text", row, f"{place} holds {written.group()!r}")
                    break
            for side, normal in enumerate(documents):
                recognised.drafts.append(Draft(row, side, place, normal))
        if JUDGED not in self.tokenizer.kinds:
            return recognised
        # Each judged answer gets a document of its prompt with the answer to another prompt: KTO
        # estimates its divergence on these. Rows near which all have one prompt are left out.
        earlier = []
        before = RecognisedChunk(chunk, DataReport())
        for row, record in enumerate(map(parsed, chunk.earlier)):
            with suppress(DataError):
                self._documents(row, record, "", before)
                earlier.append(before.judged[row])
        drafts = [*recognised.drafts]
        others = nearest_other_prompts([recognised.judged[draft.row] for draft in drafts], earlier)
        without_other = set[int]()
        for draft, other in zip(drafts, others, strict=True):
            if other is None:
                report.note("no_other_prompt", draft.row, draft.place)
                without_other.add(draft.row)
                continue
            mismatched = self.mismatched(recognised.judged[draft.row], other, draft.place)
            recognised.drafts.append(Draft(draft.row, MISMATCHED_SIDE, draft.place, mismatched))
        recognised.leave_out(without_other, "no_other_prompt")
        return recognised

    def _documents(
        self, row: int, record: RowRecord | BadRow, place: str, recognised: RecognisedChunk
    ) -> list[NormalRow]:
        """Return what a row's documents are made of, and count what is odd in it.

        Raises:
            DataError: the row cannot be used.
        """
        if isinstance(record, BadRow):
            raise DataError(f"{place}: {record.reason}", record.rule)
        kinds = self.tokenizer.kinds
        record = plain_row(with_conversations(record), place)
        kind = known_kind(record, self.requested)
        if kind is not None:
            recognised.row_kinds[row] = kind
        refuse_media(record, place)
        refuse_printed_messages(record, place)
        refuse_halves(record, place, kinds)
        kind = kind_of(record, place, self.requested)
        if kind not in kinds:
            refuse_other_kind(kind, record, place, kinds)
        findings = _RowFindings(recognised.report, row)

        def note_prompt_field(name: str) -> None:
            findings.note("columns_recognised", f"{place}: {name} is the prompt")

        if kind == PROMPT and kind in kinds:
            prompt = normal_prompt(record, self.tokenizer.completions_as_chat, place)
            form = "chat" if "messages" in prompt.record else "completion"
            forms = recognised.report.forms
            forms[form] = forms.get(form, 0) + 1
            if form == "completion" and self.tokenizer.tokenizer.chat_template is not None:
                findings.note("plain_completion", place)
            return [prompt]
        if kind == PREFERENCE and kind in kinds:
            documents = []
            sides = sides_of(record, place, note_prompt_field)
            for name, side in zip(PAIR_FIELDS, sides, strict=True):
                side_kind = kind_of(side, place)
                documents.append(self._normal(side_kind, side, f"{place} ({name})", findings))
            return documents
        if kind == JUDGED and kind in kinds:
            recognised.labels[row] = label_of(record, place)
            record = judged_completion(record, place, note_prompt_field)
            recognised.judged[row] = record
            kind = kind_of(record, place)
        return [self._normal(kind, record, place, findings)]

    def _normal(
        self, kind: str, record: RowRecord, place: str, findings: _RowFindings
    ) -> NormalRow:
        """Return one document of a row in the form in which it is encoded; count what is odd in it.

        Raises:
            DataError: an answer is empty, or a conversation has none.
        """
        if kind == "completion":
            pair = pair_of(record)
            if pair is not None and pair[0] != "prompt":
                findings.note(
                    "columns_recognised",
                    f"{place}: {pair[0]} is the prompt, {pair[1]} the completion",
                )
            if self.tokenizer.completions_as_chat:
                kind = "instruction"
                record = as_instruction(record)
        if findings.kind is None:
            findings.kind = kind
            forms = findings.report.forms
            forms[kind] = forms.get(kind, 0) + 1
        for name in unread_fields(record, kind):
            findings.note("unread_field", f"{place}: {name}")
        normal = normalise(record, kind, place)
        if self.tokenizer.train_on != "answers":
            return normal
        if normal.kind == "chat":
            messages, prompt_messages = messages_of(normal.record)
            roles = self.tokenizer.train_on_roles
            turns = self.tokenizer.train_on_turns
            answered = check_answers(messages, prompt_messages, place)
            if not answered and not trained_messages(
                messages, prompt_messages, roles, turns, place
            ):
                raise DataError(
                    f"{place}: no message of the assistant among {len(messages) - prompt_messages}",
                    "no_assistant_turn",
                )
            for rule in conversation_oddities(messages):
                findings.note(rule, place)
        if kind == "completion":
            prompt = normal.record["prompt"]
            completion = normal.record["completion"]
            if isinstance(completion, str) and not completion.strip():
                raise DataError(f"{place}: completion is empty", "empty_answer")
            if self.tokenizer.tokenizer.chat_template is not None:
                findings.note("plain_completion", place)
            if isinstance(prompt, str) and isinstance(completion, str):
                words = prompt.split(None, REPEATED_PROMPT_WORDS)
                if completion.startswith(prompt) and len(words) >= REPEATED_PROMPT_WORDS:
                    findings.note("repeated_prompt", place)
        return normal

    def mismatched(self, row: RowRecord, other: RowRecord, place: str) -> NormalRow:
        """Return the prompt of one judged row with the answer of another."""
        prompt, (_, answer) = in_one_form(row["prompt"], [row["completion"], other["completion"]])
        record: RowRecord = {**row, "prompt": prompt, "completion": answer}
        kind = kind_of(record, place)
        if kind == "completion" and self.tokenizer.completions_as_chat:
            kind = "instruction"
            record = as_instruction(record)
        return normalise(record, kind, place)


def refuse_halves(record: RowRecord, where: str, kinds: frozenset[str]) -> None:
    """Refuse a row that has one of the two fields of a pair, if the objective takes pairs.

    Raises:
        DataError: the other field is missing.
    """
    if (
        PREFERENCE not in kinds
        or not is_object(record)
        or kind_with(non_null_fields(record), kinds)
    ):
        return
    for fields, words in _FIELDS_OF_PAIRS:
        present = [name for name in fields if record.get(name) is not None]
        missing = [name for name in fields if record.get(name) is None]
        if len(present) == 1:
            raise DataError(
                f"{where}: has {present[0]}, but no {missing[0]}; {words}: where another column "
                "holds it, map it: "
                f"columns={{{missing[0]!r}: 'THEIR_NAME'}}",
                "missing_field",
            )


def refuse_other_kind(kind: str, record: RowRecord, where: str, kinds: Collection[str]) -> None:
    """Refuse a row whose kind the objective does not take.

    Returns without an error for a kind that ``normalise`` refuses with its own words.

    Args:
        kind: of the row.
        record: the row.
        where: what errors call the row.
        kinds: that the objective takes; not only ``DOCUMENT_KINDS``.

    Raises:
        DataError: the row is of another kind, or lacks a label.
    """
    named = [
        f"{wanted}: {EXPECTED_FIELDS[wanted]}" if wanted in EXPECTED_FIELDS else wanted
        for wanted in sorted(kinds)
    ]
    taken = f"the objective takes {', '.join(named)}"
    row_kind = kind_with(non_null_fields(record), frozenset((PREFERENCE, JUDGED))) or kind
    for wanted in sorted(kinds):
        if (wanted, row_kind) in _OTHER_OBJECTIVES:
            raise DataError(
                f"{where}: {_OTHER_OBJECTIVES[wanted, row_kind]}; {taken}", "unusable_kind"
            )
    if JUDGED in kinds and record.get("label") is None:
        with_label = non_null_fields(record) | {"label"}
        if kind_with(with_label, frozenset((JUDGED,))) is not None:
            label_of(record, where)  # raises
    if kind in DOCUMENT_KINDS:
        raise DataError(f"{where}: is of kind {kind}; {taken}", "unusable_kind")
