"""``report.html`` of a study: its best settings, its trials, and what the score depends on."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from chronicals.training.run.page import image, table, write_page
from chronicals.tuning.results import results_of
from chronicals.tuning.search import Search, importances
from chronicals.tuning.space import Dimension
from chronicals.tuning.study import Study
from chronicals.tuning.trial import State, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_FILE = "report.html"

LEAST_FOR_IMPORTANCE = 20
"""Complete trials from which shares of importance are shown: fewer hardly tell them from chance."""

MARKS = {State.COMPLETE: "o", State.PRUNED: "x"}
"""Marks of trials with a score in the history."""


def write_report(study: Study, search: Search) -> None:
    """Write the report of a study, whole or not at all."""
    trials = study.trials()
    searched = [trial for trial in trials if trial.repeats is None]
    results = results_of(search.settings, trials)
    facts: dict[str, object] = {
        "metric": search.settings.metric,
        "trials": _counts(searched),
        "time in trials": str(timedelta(seconds=round(sum(map(_seconds, trials))))),
    }
    sections: list[tuple[str, str]] = []
    if results is not None:
        reason = results.why_no_different()
        facts["your own settings"] = str(results.own)
        facts["best settings"] = f"trial {results.best[0].trial.number}: {results.best[0]}"
        facts["difference"] = reason or "the best are better than yours"
    scored = [trial for trial in searched if trial.reports or trial.value is not None]
    if scored:
        sections.append(("History", image("score of each trial", _history(search, scored))))
    complete = [trial for trial in searched if trial.state == State.COMPLETE]
    sections.append(("Importance", _importance(search, complete)))
    if len(complete) > 1:
        drawn = image("values and score of each trial", _coordinates(search, complete))
        sections.append(("Parallel coordinates", drawn))
    sections.append(("Trials", _trials(search, trials)))
    aside = study.folder / f".{REPORT_FILE}"
    write_page(aside, f"chronicals: {study.folder.name}", facts, sections)
    os.replace(aside, study.folder / REPORT_FILE)


def _counts(trials: Sequence[Trial]) -> str:
    """Return how many trials have each state, in words."""
    counts = {state: sum(trial.state == state for trial in trials) for state in State}
    words = [f"{count} {state}" for state, count in counts.items() if count]
    return f"{len(trials)} ({', '.join(words)})"


def _seconds(trial: Trial) -> float:
    return 0.0 if trial.ended is None else trial.ended - trial.began


def _trials(search: Search, trials: Sequence[Trial]) -> str:
    """Render the table of all trials."""
    names = list(search.space.dimensions)
    columns = ("trial", "seed", "state", "score", *names, "seconds", "why")
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        name = str(trial.number)
        if trial.repeats is not None:
            name += f" (repeats {trial.repeats})"
        score = "" if trial.value is None else f"{trial.value:.6g}"
        values = [shown_value(trial.params[name]) for name in names]
        seconds = f"{_seconds(trial):.1f}"
        rows.append((name, str(trial.seed), trial.state, score, *values, seconds, trial.reason))
    return table(columns, rows)


def shown_value(value: Any) -> str:
    """Return a value of a dimension for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _importance(search: Search, complete: Sequence[Trial]) -> str:
    """Render each dimension's share of importance, if there are trials enough."""
    if len(complete) < LEAST_FOR_IMPORTANCE:
        return (
            f"<p>Shown from {LEAST_FOR_IMPORTANCE} complete trials on; there are "
            f"{len(complete)}.</p>"
        )
    shares = importances(search, complete)
    rows = [(name, f"{share:.0%}") for name, share in shares.items()]
    return table(("field", "share of what the score depends on"), rows)


def _history(search: Search, trials: Sequence[Trial]) -> bytes:
    """Draw the last score of each trial, and the best so far."""
    figure, axis = _one_plot()
    sign = -1.0 if search.settings.maximizes else 1.0
    for state, mark in MARKS.items():
        drawn = [trial for trial in trials if trial.state == state]
        scores = [trial.last_score for trial in drawn]
        axis.plot([trial.number for trial in drawn], scores, mark, label=str(state))
    best: list[tuple[int, float]] = []
    for trial in trials:
        if trial.value is not None and (not best or sign * trial.value < sign * best[-1][1]):
            best.append((trial.number, trial.value))
    axis.step(*zip(*best), where="post", lw=1.2, label="best so far")
    axis.set_xlabel("trial", fontsize=8)
    axis.set_ylabel(search.settings.metric, fontsize=8)
    axis.legend(frameon=False)
    return _svg(figure)


def _coordinates(search: Search, complete: Sequence[Trial]) -> bytes:
    """Draw a line for each complete trial through its values, darker for a better score."""
    figure, axis = _one_plot()
    names = [*search.space.dimensions]
    sign = -1.0 if search.settings.maximizes else 1.0
    worst_first = sorted(complete, key=lambda trial: -sign * (trial.value or 0.0))
    scores = [trial.value or 0.0 for trial in complete]
    low, high = min(scores), max(scores)
    for rank, trial in enumerate(worst_first):
        heights = [
            dimension.height(trial.params[name])
            for name, dimension in search.space.dimensions.items()
        ]
        heights.append(((trial.value or 0.0) - low) / ((high - low) or 1.0))
        shade = 0.15 + 0.85 * rank / len(worst_first)
        axis.plot(heights, color="tab:blue", alpha=shade, lw=0.8 + shade)
    axis.set_xticks(range(len(names) + 1), [*names, search.settings.metric], fontsize=8)
    axis.set_yticks([])
    ends = [_ends(dimension) for dimension in search.space.dimensions.values()]
    for place, (bottom, top) in enumerate([*ends, (shown_value(low), shown_value(high))]):
        axis.annotate(bottom, (place, 0), (3, -9), textcoords="offset points", fontsize=7)
        axis.annotate(top, (place, 1), (3, 3), textcoords="offset points", fontsize=7)
    return _svg(figure)


def _ends(dimension: Dimension) -> tuple[str, str]:
    return shown_value(dimension.values[0]), shown_value(dimension.values[-1])


def _one_plot() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4))
    figure.subplots_adjust(left=0.08, right=0.97, bottom=0.14, top=0.94)
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _svg(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()
