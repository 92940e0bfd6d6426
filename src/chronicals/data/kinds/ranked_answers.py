"""Ranked answers: a row with several answers to a prompt and a score for each, as the pair of
the best and the worst.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from chronicals.data.kinds.rows import json_list
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import items_of
from chronicals.data.reading.records import Record

ANSWERS = "responses"
SCORES = "scores"


def best_and_worst(record: Record, where: str) -> Record:
    """The row with ``chosen`` and ``rejected``, the answers of the highest and of the lowest score,
    the first of several.

    Raises:
        DataError: there is not one finite score for each of at least two answers, or all scores are
            equal.
    """
    answers, scores = (_listed(record[name], name, where) for name in (ANSWERS, SCORES))
    if len(answers) != len(scores):
        raise DataError(
            f"{where}: {len(answers)} {ANSWERS} and {len(scores)} {SCORES}", "unusable_scores"
        )
    if len(answers) < 2:
        raise DataError(
            f"{where}: {ANSWERS} has {len(answers)}, of which no pair can be made",
            "unusable_scores",
        )
    for number, score in enumerate(scores, 1):
        if not isinstance(score, Real) or not math.isfinite(score):
            raise DataError(
                f"{where}: score {number} is {score!r}, not a finite number", "unusable_scores"
            )
    if max(scores) == min(scores):
        raise DataError(f"{where}: all {len(scores)} {SCORES} are {scores[0]}", "tied_scores")
    best, worst = (answers[scores.index(end(scores))] for end in (max, min))
    kept = {name: value for name, value in record.items() if name not in (ANSWERS, SCORES)}
    return {**kept, "chosen": best, "rejected": worst}


def _listed(value: Any, name: str, where: str) -> list[Any]:
    found = json_list(value) if isinstance(value, str) else items_of(value)
    if found is None:
        raise DataError(
            f"{where}: {name} must be a list, this is {type(value).__name__}", "wrong_type"
        )
    return found
