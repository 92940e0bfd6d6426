"""What is said of a row that an objective of pairs or judged answers does not take: what it is,
or what it lacks.
"""

from __future__ import annotations

from collections.abc import Collection

from chronicals.data.kinds.judged_answers import JUDGED, judgement, lacks_a_judgement
from chronicals.data.kinds.preferences import PREFERENCE, SIDES
from chronicals.data.kinds.ranked_answers import ANSWERS, SCORES
from chronicals.data.kinds.rows import EXPECTED, TRAINED, fields_of, is_object, kind_among
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record

TOGETHER = (
    (SIDES, "a pair is of both"),
    ((ANSWERS, SCORES), "a ranked list is of both, with one number for each answer"),
)
"""Fields of which a pair is made, and what is said where one of them stands alone."""

INSTEAD = {
    (
        PREFERENCE,
        JUDGED,
    ): "holds a judged answer (one answer and its label); take objective='kto' for these, or give "
    "both a chosen and a rejected answer to each prompt",
    (
        PREFERENCE,
        "prompt",
    ): "holds a prompt without answers; where other columns hold them, map them: "
    "columns={'chosen': 'THEIR_BETTER', 'rejected': 'THEIR_WORSE'}",
    (
        JUDGED,
        PREFERENCE,
    ): "holds a preference pair; take an objective of pairs for these (objective='dpo', say), or "
    "make "
    "two rows of it, the chosen answer as completion with label true and the rejected one with "
    "label false",
    (
        JUDGED,
        "prompt",
    ): "holds a prompt without an answer; where other columns hold it and its label, map them: "
    "columns={'completion': 'THEIR_ANSWER', 'label': 'THEIR_LABEL'}",
}
"""By the kind that the objective takes and the kind of the row: what the row is, and what to do."""


def refuse_halves(record: Record, where: str, kinds: Collection[str]) -> None:
    """Raises DataError where an objective of pairs is given one of the two fields that make one."""
    if PREFERENCE not in kinds or not is_object(record) or kind_among(fields_of(record), kinds):
        return
    for fields, both in TOGETHER:
        if len(given := [name for name in fields if record.get(name) is not None]) == 1:
            other = next(name for name in fields if name not in given)
            raise DataError(
                f"{where}: has {given[0]}, but no {other}; {both}: where another column holds it, "
                "map it: "
                f"columns={{{other!r}: 'THEIR_NAME'}}",
                "missing_field",
            )


def refuse(kind: str, record: Record, where: str, kinds: Collection[str]) -> None:
    """Raises DataError for a row of a ``kind`` that is none of the objective's ``kinds``, which
    are not those of ``TRAINED`` alone; returns where the row is refused by what it is itself."""
    held = kind_among(fields_of(record), (PREFERENCE, JUDGED)) or kind
    for wanted in sorted(kinds):
        if (wanted, held) in INSTEAD:
            raise DataError(
                f"{where}: {INSTEAD[wanted, held]}; the objective takes {_taken(kinds)}",
                "unusable_kind",
            )
    if JUDGED in kinds and lacks_a_judgement(record):
        judgement(record, where)
    if kind in TRAINED:
        raise DataError(
            f"{where}: is of kind {kind}; the objective takes {_taken(kinds)}", "unusable_kind"
        )


def _taken(kinds: Collection[str]) -> str:
    return ", ".join(
        f"{kind}: {EXPECTED[kind]}" if kind in EXPECTED else kind for kind in sorted(kinds)
    )
