"""Errors for rows that an objective of pairs or judged answers does not take.

They say what the row is, or what it lacks.
"""

from __future__ import annotations

from collections.abc import Collection

from chronicals.data.kinds.judged_answers import JUDGED, label_of, lacks_label
from chronicals.data.kinds.preferences import PREFERENCE, SIDES
from chronicals.data.kinds.ranked_answers import RANKED_ANSWERS, RANKED_SCORES
from chronicals.data.kinds.rows import DOCUMENT_KINDS, EXPECTED_FIELDS, fields_of, kind_among
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import is_object
from chronicals.data.reading.records import Record

_FIELDS_OF_PAIRS = (
    (SIDES, "a pair is of both"),
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


def refuse_halves(record: Record, where: str, kinds: Collection[str]) -> None:
    """Refuse a row that has one of the two fields of a pair, if the objective takes pairs.

    Raises:
        DataError: the other field is missing.
    """
    if PREFERENCE not in kinds or not is_object(record) or kind_among(fields_of(record), kinds):
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


def refuse_other_kind(kind: str, record: Record, where: str, kinds: Collection[str]) -> None:
    """Refuse a row whose kind the objective does not take.

    Returns without an error for a kind that ``normalise`` refuses with its own words.

    Args:
        kind: of the row.
        kinds: that the objective takes; not only ``DOCUMENT_KINDS``.

    Raises:
        DataError: the row is of another kind, or lacks a label.
    """
    named = [
        f"{wanted}: {EXPECTED_FIELDS[wanted]}" if wanted in EXPECTED_FIELDS else wanted
        for wanted in sorted(kinds)
    ]
    taken = f"the objective takes {', '.join(named)}"
    row_kind = kind_among(fields_of(record), (PREFERENCE, JUDGED)) or kind
    for wanted in sorted(kinds):
        if (wanted, row_kind) in _OTHER_OBJECTIVES:
            raise DataError(
                f"{where}: {_OTHER_OBJECTIVES[wanted, row_kind]}; {taken}", "unusable_kind"
            )
    if JUDGED in kinds and lacks_label(record):
        label_of(record, where)  # raises
    if kind in DOCUMENT_KINDS:
        raise DataError(f"{where}: is of kind {kind}; {taken}", "unusable_kind")
