"""Ranked answers: a row with several answers to a prompt and a score for each.

It becomes a pair of the best and the worst answer.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from chronicals.data.kinds.json_fields import json_list
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import items_of
from chronicals.data.reading.records import Record

RANKED_ANSWERS = "responses"
RANKED_SCORES = "scores"
"""Fields of the answers and of their scores."""


def best_and_worst(record: Record, where: str) -> Record:
    """Return the row with ``chosen`` and ``rejected``: the first answers of the extreme scores.

    Raises:
        DataError: there is not one finite score for each of at least two answers, or all scores are
            equal.
    """
    answers = _listed(record[RANKED_ANSWERS], RANKED_ANSWERS, where)
    scores = _listed(record[RANKED_SCORES], RANKED_SCORES, where)
    if len(answers) != len(scores):
        raise DataError(
            f"{where}: {len(answers)} {RANKED_ANSWERS} and {len(scores)} {RANKED_SCORES}",
            "unusable_scores",
        )
    if len(answers) < 2:
        raise DataError(
            f"{where}: {RANKED_ANSWERS} has {len(answers)}, of which no pair can be made",
            "unusable_scores",
        )
    for number, score in enumerate(scores, 1):
        if not isinstance(score, Real) or not math.isfinite(score):
            raise DataError(
                f"{where}: score {number} is {score!r}, not a finite number", "unusable_scores"
            )
    if max(scores) == min(scores):
        raise DataError(
            f"{where}: all {len(scores)} {RANKED_SCORES} are {scores[0]}", "tied_scores"
        )
    ranked = (RANKED_ANSWERS, RANKED_SCORES)
    others = {name: value for name, value in record.items() if name not in ranked}
    best = answers[scores.index(max(scores))]
    worst = answers[scores.index(min(scores))]
    return {**others, "chosen": best, "rejected": worst}


def _listed(value: Any, name: str, where: str) -> list[Any]:
    items = json_list(value) if isinstance(value, str) else items_of(value)
    if items is None:
        raise DataError(
            f"{where}: {name} must be a list, this is {type(value).__name__}", "wrong_type"
        )
    return items
