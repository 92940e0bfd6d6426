"""Charts of curves, as options of ECharts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chronicals.ui.metrics import Curve, Metrics, Point

COLOURS = ("#3b76e1", "#dd7a2a", "#2c9c74", "#b4519c", "#98842c", "#6a7a8c")
"""Colours of runs; each has a contrast of 3 : 1 to white and to the dark ground (WCAG 1.4.11)."""

QUIET = "#8b93a1"
"""Colour of axes, which is read on white and on dark."""

GRID = "rgba(139, 147, 161, .18)"

TITLES = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "fill": "packing fill",
    "memory_gib": "memory, GiB",
    "epoch": "epoch",
}
"""Words for metrics; others have their own names."""

FIRST = ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second")
LAST = ("fill", "memory_gib", "epoch")
"""Metrics that are drawn before and after those of the objective."""


def drawn_metrics(runs: Sequence[Metrics]) -> list[str]:
    """Return the metrics of some runs that are not zero throughout, in the order of their charts."""
    names: dict[str, None] = {}
    for run in runs:
        for name, points in run.curves.items():
            if any(value for _, value in points):
                names[name] = None
    others = [name for name in names if name not in (*FIRST, *LAST)]
    return [name for name in (*FIRST, *others, *LAST) if name in names]


def line_chart(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return the options of a chart with a curve for each run.

    A curve with a mean is drawn pale, and its mean over it.

    Args:
        curves: by the name of their run.
    """
    series: list[dict[str, Any]] = []
    for number, (run, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        series.append(_series(run, curve.points, colour, 0.28 if curve.mean else 1.0))
        if curve.mean:
            series.append(_series(run, curve.mean, colour, 1.0))
    several = len(curves) > 1
    return {
        "animation": False,
        "legend": {
            "show": several,
            "top": 0,
            "type": "scroll",
            "icon": "roundRect",
            "itemWidth": 10,
            "itemHeight": 10,
            "textStyle": {"color": QUIET, "fontSize": 11},
            "pageTextStyle": {"color": QUIET},
        },
        "grid": {
            "left": 8,
            "right": 14,
            "top": 34 if several else 12,
            "bottom": 8,
            "containLabel": True,
        },
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},
        "xAxis": _axis(),
        "yAxis": _axis(),
        "series": series,
    }


def _axis() -> dict[str, Any]:
    return {
        "type": "value",
        "scale": True,
        "axisLabel": {"color": QUIET, "fontSize": 11, "hideOverlap": True},
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": GRID}},
    }


def _series(name: str, points: list[Point], colour: str, opacity: float) -> dict[str, Any]:
    return {
        "type": "line",
        "name": name,
        "data": points,
        "showSymbol": len(points) < 3,
        "lineStyle": {"color": colour, "width": 1.6, "opacity": opacity},
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
    }


def bars(names: Sequence[str], values: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return the options of horizontal bars with their spread.

    Args:
        names: of the bars, the first at the top.
        values: of each the middle, the lowest and the highest.
    """
    spread = [
        {
            "type": "line",
            "data": [[low, number], [high, number]],
            "showSymbol": True,
            "symbol": "rect",
            "symbolSize": [2, 12],
            "lineStyle": {"color": QUIET, "width": 2},
            "itemStyle": {"color": QUIET},
            "z": 3,
        }
        for number, (_, low, high) in enumerate(values)
    ]
    return {
        "animation": False,
        "grid": {"left": 8, "right": 24, "top": 8, "bottom": 8, "containLabel": True},
        "tooltip": {"renderMode": "richText", "confine": True},
        "xAxis": {**_axis(), "min": 0},
        "yAxis": {
            "type": "category",
            "data": list(names),
            "inverse": True,
            "axisLabel": {"color": QUIET},
            "axisLine": {"show": False},
            "axisTick": {"show": False},
        },
        "series": [
            {
                "type": "bar",
                "data": [middle for middle, _, _ in values],
                "barMaxWidth": 22,
                "itemStyle": {"color": COLOURS[0], "borderRadius": [0, 3, 3, 0]},
            },
            *spread,
        ],
    }
