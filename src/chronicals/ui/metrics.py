"""Curves of runs, read from ``metrics.jsonl`` as it grows."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

Point = tuple[float, float]

NO_MEAN = ("learning_rate", "epoch")
"""Metrics that are smooth by themselves."""

SMOOTH_FROM = 50
"""Points from which a curve has its mean beside it."""

NOT_DRAWN = {"step", "time", "skipped", "targets", "tokens"}
"""Numbers of a line that are no curves."""

SHOWN_POINTS = 1000
"""Points of a curve that are sent to a page, which is no wider in pixels."""

SMOOTHING = 0.92
"""Share of the mean before a point in the mean after it (exponential)."""


@dataclass(frozen=True)
class Curve:
    """A curve as a page draws it.

    Attributes:
        points: at most ``SHOWN_POINTS`` of its points.
        mean: the exponential mean at as many; empty for a short or smooth curve.
    """

    points: list[Point]
    mean: list[Point]


@dataclass
class Metrics:
    """Curves of a run so far.

    A resumed run replaces the file. Another file of this name, or a shorter one, is read anew.

    Attributes:
        path: of the file.
        curves: points of each metric, step and value.
        began, last: seconds since 1970 of the first and last line.
    """

    path: Path
    curves: dict[str, list[Point]] = field(default_factory=dict)
    began: float | None = None
    last: float | None = None
    _position: tuple[int, int] = (0, 0)
    _drawn: dict[str, tuple[int, Curve]] = field(default_factory=dict)

    def curve(self, name: str) -> Curve:
        """Return a metric as it is drawn; it is thinned once for all pages."""
        points = self.curves.get(name, [])
        count, known = self._drawn.get(name, (-1, Curve([], [])))
        if count != len(points):
            has_mean = len(points) >= SMOOTH_FROM and name not in NO_MEAN
            known = Curve(thinned(points), thinned(smoothed(points)) if has_mean else [])
            self._drawn[name] = (len(points), known)
        return known

    @property
    def step(self) -> int:
        """Step of the last point."""
        return int(max((points[-1][0] for points in self.curves.values()), default=0))

    def value(self, name: str) -> float | None:
        """Return the last value of a metric; None if it has none."""
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def read_on(self) -> bool:
        """Read the lines that were added, and return whether anything changed.

        A line that is not finished yet is left for the next time.
        """
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                inode, offset = self._position
                anew = inode != about.st_ino or about.st_size < offset
                if anew:
                    self.curves = {}
                    self.began = None
                    self.last = None
                    self._drawn = {}
                    offset = 0
                file.seek(offset)
                added = file.read()
        except OSError:
            changed = bool(self.curves)
            self.curves = {}
            self._position = (0, 0)
            return changed
        whole = added[: added.rfind(b"\n") + 1]
        self._position = (about.st_ino, offset + len(whole))
        for line in whole.splitlines():
            self._add(line)
        return anew or bool(whole)

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = values["step"]
        except (ValueError, KeyError, TypeError):
            return
        self.last = values.get("time", self.last)
        self.began = self.last if self.began is None else self.began
        for name, value in values.items():
            if name not in NOT_DRAWN and isinstance(value, (int, float)):
                self.curves.setdefault(name, []).append((step, value))


def thinned(points: list[Point], most: int = SHOWN_POINTS) -> list[Point]:
    """Return at most so many points: of each stretch the lowest and the highest, and the last."""
    if len(points) <= most:
        return points
    stretches = max(most // 2 - 1, 1)
    kept: list[Point] = []
    for number in range(stretches):
        begin = number * len(points) // stretches
        end = (number + 1) * len(points) // stretches
        part = points[begin:end]
        lowest = min(range(len(part)), key=lambda at: part[at][1])
        highest = max(range(len(part)), key=lambda at: part[at][1])
        kept += [part[at] for at in sorted({lowest, highest})]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def smoothed(points: list[Point], share: float = SMOOTHING) -> list[Point]:
    """Return the exponential mean at each point, free of the bias of its beginning.

    That is Σ share^(n−i) y_i / Σ share^(n−i), as in Adam's first moment.
    """
    mean = 0.0
    weight = 0.0
    result: list[Point] = []
    for step, value in points:
        mean = share * mean + (1 - share) * value
        weight = share * weight + (1 - share)
        result.append((step, mean / weight))
    return result
