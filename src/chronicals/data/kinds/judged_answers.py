"""Judged answers: a row with one answer to a prompt and a label that calls it good or bad.

KTO (Ethayarajh et al., 2024) trains on such rows.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chronicals.data.kinds.json_fields import conversation_in
from chronicals.data.kinds.messages import as_list, comparable, role_of
from chronicals.data.kinds.preferences import NotePromptField, completion_rows, in_one_form
from chronicals.data.kinds.rows import fields_of, kind_among
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record
from chronicals.data.reading.row_fields import CONVERSATION_FIELDS

JUDGED = "unpaired preference"
"""The kind of these rows."""

ANSWER_FIELDS = ("completion", "response", "output", "answer", *CONVERSATION_FIELDS)
"""Names of the answer; in a conversation it is the last message if no other field holds it."""

LABEL_TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as a table of text has them, in lower case."""

ROWS_LOOKED_BACK = 32
"""Rows before a chunk that are searched for one with another prompt."""


def lacks_label(record: Mapping[str, Any]) -> bool:
    """Return whether the row would be a judged answer if it had a label."""
    with_label = {*fields_of(record), "label"}
    return record.get("label") is None and kind_among(with_label, (JUDGED,)) is not None


def label_of(record: Record, where: str) -> int:
    """Return 1 if the answer is good and 0 if it is bad.

    Raises:
        DataError: there is no label, or it is neither true nor false.
    """
    label = record.get("label")
    value = LABEL_TEXTS.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(value, (bool, np.bool_, numbers.Real)) or value not in (0, 1):
        remedy = (
            "; where columns are named, name it too: columns={'label': 'label'}"
            if label is None
            else ""
        )
        raise DataError(
            f"{where}: label={label!r}: must be true for a good answer or false for a bad "
            f"one{remedy}",
            "unusable_label",
        )
    return int(value == 1)


def judged_completion(
    record: Record, where: str, note_prompt_field: NotePromptField | None = None
) -> Record:
    """Return the row as one of prompt and completion.

    Raises:
        DataError: as ``completion_rows``; or a conversation does not end with the assistant.
    """
    name = next(name for name in ANSWER_FIELDS if record.get(name) is not None)
    answer = record[name]
    if name in CONVERSATION_FIELDS:
        answer = conversation_in(answer, name, where)
        messages = as_list(answer)
        if isinstance(messages, list) and messages and role_of(messages[-1]) != "assistant":
            raise DataError(
                f"{where}: {name} does not end with the assistant, whose answer is judged",
                "no_assistant_turn",
            )
    others = {field: value for field, value in record.items() if field not in ("label", name)}
    (row,) = completion_rows(others, {name: answer}, where, note_prompt_field)
    return row


def with_answer_of(row: Record, other: Record) -> Record:
    """Return the prompt of one row with the answer of another, both from ``judged_completion``."""
    prompt, (_, answer) = in_one_form(row["prompt"], [row["completion"], other["completion"]])
    return {**row, "prompt": prompt, "completion": answer}


def nearest_other_prompts(
    rows: Sequence[Record], earlier: Sequence[Record] = ()
) -> list[Record | None]:
    """Return for each row the nearest before it with another prompt, else the nearest behind it.

    Args:
        rows: as ``judged_completion`` gives them.
        earlier: rows before the first.

    Returns:
        None for a row if all have its prompt.
    """
    all_rows = [*earlier, *rows]
    prompts = [
        repr(comparable(row["prompt"])) if isinstance(row["prompt"], list) else row["prompt"]
        for row in all_rows
    ]
    first_other = next((at for at, prompt in enumerate(prompts) if prompt != prompts[0]), None)
    before: list[int | None] = []
    for at, prompt in enumerate(prompts):
        if at == 0:
            before.append(None)
        elif prompts[at - 1] != prompt:
            before.append(at - 1)
        else:
            before.append(before[at - 1])
    nearest = [first_other if at is None else at for at in before[len(earlier) :]]
    return [None if at is None else all_rows[at] for at in nearest]
