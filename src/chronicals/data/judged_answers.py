"""Judged answers: a row with one answer to a prompt and a label that calls it good or bad (KTO's data)."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from chronicals.data.gate import DataError
from chronicals.data.preferences import sides_of
from chronicals.data.records import Record

JUDGED = "unpaired preference"
"""The kind of these rows."""

ANSWER = ("completion", "response")
"""Names of the answer."""


def judgement(record: Record, where: str) -> int:
    """1 where the answer is good, 0 where it is bad.

    Raises:
        DataError: the label is neither true nor false.
    """
    label = record["label"]
    known = isinstance(label, (bool, np.bool_)) or (isinstance(label, numbers.Real) and label in (0, 1))
    if not known:
        raise DataError(f"{where}: label={label!r}: must be true for a good answer or false for a bad one", "wrong_type")
    return int(label)


def answer_to(record: Record, other: Record, where: str) -> Record:
    """A row of prompt and completion: the prompt of ``record`` with the answer of ``other``, which may be the same row."""
    own, theirs = (row[next(name for name in ANSWER if row.get(name) is not None)] for row in (record, other))
    kept: dict[str, Any] = {name: value for name, value in record.items() if name not in ("label", *ANSWER)}
    return sides_of({**kept, "chosen": own, "rejected": theirs}, where)[1]
