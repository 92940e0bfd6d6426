"""Judged answers: a row with one answer to a prompt and a label that calls it good or bad (KTO's data)."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from chronicals.data.gate import DataError
from chronicals.data.preferences import alike, rows_of
from chronicals.data.records import Record

JUDGED = "unpaired preference"
"""The kind of these rows."""

ANSWER = ("completion", "response")
"""Names of the answer."""


def judgement(record: Record, where: str) -> int:
    """1 where the answer is good, 0 where it is bad.

    Raises:
        DataError: there is no label, or it is neither true nor false.
    """
    label = record.get("label")
    if not isinstance(label, (bool, np.bool_, numbers.Real)) or label not in (0, 1):
        raise DataError(f"{where}: label={label!r}: must be true for a good answer or false for a bad one", "unusable_label")
    return int(label == 1)


def answered(record: Record, where: str) -> Record:
    """The row as one of prompt and completion.

    Raises:
        DataError: as ``rows_of``.
    """
    name = next(name for name in ANSWER if record.get(name) is not None)
    kept: dict[str, Any] = {field: value for field, value in record.items() if field not in ("label", *ANSWER)}
    return rows_of(kept, {name: record[name]}, where)[0]


def answer_to(record: Record, other: Record, where: str) -> Record:
    """A row of prompt and completion: the prompt of ``record`` with the answer of ``other``."""
    own = answered(record, where)
    prompt, (_, theirs) = alike(own["prompt"], [own["completion"], answered(other, where)["completion"]])
    return {**own, "prompt": prompt, "completion": theirs}
