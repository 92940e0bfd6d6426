"""Scores of trials, read from the lines of ``metrics.jsonl`` of their runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

UNTIMED_STEPS = 10
"""Steps before the first that is timed: compilation, capture of graphs, caches and clocks."""

TIMED_STEPS = 20
"""Steps that are timed: the least from which a median is taken here (docs/benchmark.md)."""

LOSS_TOLERANCE = 0.01
GRADIENT_TOLERANCE = 0.10
"""Relative deviations of the loss and of the gradient norm, in the mean over the steps, up to which
two settings compute the same: those of ``benchmark``, for products in other orders and dtypes."""


class NoScore(ValueError):
    """A run has no score of this kind; the message says what there is."""


def held_out_score(line: Mapping[str, Any], metric: str) -> float:
    """Return the score of an evaluation.

    ``loss`` is the cross-entropy alone where the objective has one: other terms of its loss have
    weights, which may be what is tuned.

    Args:
        line: of an evaluation.
        metric: name of the metric.

    Raises:
        NoScore: the evaluation has no such metric, or it is not finite.
    """
    names = [metric]
    if metric == "loss":
        names = ["cross_entropy", "loss"]
    found = (line[f"eval_{name}"] for name in names if f"eval_{name}" in line)
    value = next(found, None)
    if value is None:
        there = sorted(name.removeprefix("eval_") for name in line if name.startswith("eval_"))
        raise NoScore(f"metric={metric!r}: evaluations have {', '.join(there)}")
    if not math.isfinite(value):
        raise NoScore(f"metric={metric!r}: {value} is not a number")
    return value


def speed_of(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of real tokens a second in the timed steps of a run.

    Raises:
        NoScore: there are too few.
    """
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    timed = speeds[UNTIMED_STEPS:]
    if len(timed) < TIMED_STEPS:
        raise NoScore(f"{len(timed)} steps were timed, and {TIMED_STEPS} are needed")
    return statistics.median(timed)


def why_other_steps(
    lines: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return why a run does not compute the steps of trial 0; None if it does.

    Args:
        lines: of the run.
        first: of the run of trial 0.
    """
    steps = {line["step"]: line for line in first if "grad_norm" in line}
    shared = [(line, steps[line["step"]]) for line in lines if line["step"] in steps]
    if len(shared) < UNTIMED_STEPS + TIMED_STEPS:
        return f"only {len(shared)} steps can be compared with those of trial 0"
    for name, words, tolerance in (
        ("loss", "loss", LOSS_TOLERANCE),
        ("grad_norm", "gradient norm", GRADIENT_TOLERANCE),
    ):
        deviations = [_deviation(mine[name], its[name]) for mine, its in shared]
        deviation = statistics.fmean(deviations)
        if not deviation <= tolerance:  # also refuses NaN
            return f"its {words} deviates by {deviation:.1%} from that of trial 0"
    return None


def _deviation(value: float, expected: float) -> float:
    """Return a relative deviation.

    It is 0 where neither is a number: fp16's loss scale lets both runs skip such a step.
    """
    if math.isnan(value) and math.isnan(expected):
        return 0.0
    return abs(value - expected) / (abs(expected) or 1.0)
