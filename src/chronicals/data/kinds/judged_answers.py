"""Judged answers: a row with one answer to a prompt and a label that calls it good or bad (KTO's
data).
"""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from chronicals.data.kinds.preferences import Tell, alike, rows_of
from chronicals.data.kinds.prompt_fields import CONVERSATIONS, as_list, role_of, said_in
from chronicals.data.kinds.rows import conversation_in, fields_of, kind_among
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record

JUDGED = "unpaired preference"
"""The kind of these rows."""

ANSWER = ("completion", "response", "output", "answer", *CONVERSATIONS)
"""Names of the answer; of a conversation it is the last message, if it is not in a field of its
own.
"""

JUDGEMENTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as the texts that a table has."""

EARLIER = 32
"""Rows before a chunk that are looked through for one of another prompt."""


def lacks_a_judgement(record: Mapping[str, Any]) -> bool:
    """Whether the row would be a judged answer if it had a label."""
    return (
        record.get("label") is None
        and kind_among({*fields_of(record), "label"}, (JUDGED,)) is not None
    )


def judgement(record: Record, where: str) -> int:
    """1 where the answer is good, 0 where it is bad; one of ``JUDGEMENTS`` counts in any case.

    Raises:
        DataError: there is no label, or it is neither true nor false.
    """
    label = record.get("label")
    said = JUDGEMENTS.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(said, (bool, np.bool_, numbers.Real)) or said not in (0, 1):
        named = (
            "; where columns are named, name it too: columns={'label': 'label'}"
            if label is None
            else ""
        )
        raise DataError(
            f"{where}: label={label!r}: must be true for a good answer or false for a bad "
            f"one{named}",
            "unusable_label",
        )
    return int(said == 1)


def answered(record: Record, where: str, tell: Tell | None = None) -> Record:
    """The row as one of prompt and completion.

    Raises:
        DataError: as ``rows_of``; or a conversation does not end with the assistant.
    """
    name = next(name for name in ANSWER if record.get(name) is not None)
    answer = conversation_in(record[name], name, where) if name in CONVERSATIONS else record[name]
    if (
        name in CONVERSATIONS
        and isinstance(chat := as_list(answer), list)
        and chat
        and role_of(chat[-1]) != "assistant"
    ):
        raise DataError(
            f"{where}: {name} does not end with the assistant, whose answer is judged",
            "no_assistant_turn",
        )
    kept = {field: value for field, value in record.items() if field not in ("label", name)}
    return rows_of(kept, {name: answer}, where, tell)[0]


def with_answer_of(own: Record, other: Record) -> Record:
    """A row of prompt and completion, both as ``answered`` gives them: the prompt of one with
    the answer of the other.
    """
    prompt, (_, theirs) = alike(own["prompt"], [own["completion"], other["completion"]])
    return {**own, "prompt": prompt, "completion": theirs}


def of_other_prompts(rows: Sequence[Record], earlier: Sequence[Record] = ()) -> list[Record | None]:
    """For each of ``rows``, as ``answered`` gives them, the nearest before it with another prompt,
    else the nearest behind it.

    Args:
        earlier: rows before the first.

    Returns:
        None for a row where all have its prompt.
    """
    all_rows = [*earlier, *rows]
    asked = [_asked(row) for row in all_rows]
    found: list[int | None] = []
    for at in range(len(all_rows)):
        found.append(None if at == 0 else at - 1 if asked[at - 1] != asked[at] else found[at - 1])
    first_of_another = next((at for at, question in enumerate(asked) if question != asked[0]), None)
    chosen = [first_of_another if at is None else at for at in found[len(earlier) :]]
    return [None if at is None else all_rows[at] for at in chosen]


def _asked(row: Record) -> Hashable:
    prompt = row["prompt"]
    return repr(said_in(prompt)) if isinstance(prompt, list) else prompt
