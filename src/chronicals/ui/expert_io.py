"""Experts' I/O of a run, read from ``io.jsonl`` as it grows.

A line is ``{t, kind, tier, layer, expert, bytes, us}``: ``t`` in seconds, ``kind`` one of ``hit``,
``miss``, ``load``, ``evict``, ``prefetch``, ``stall`` and ``step``, ``tier`` where the expert was
looked for or read from, ``us`` the microseconds that it took. Of other kinds, which an engine of
another version may write, the number of lines is kept.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

IO = "io.jsonl"

SECONDS_OF_A_BIN = 1.0
"""Seconds of a point of the curves."""


@dataclass
class Tier:
    """Sums of a tier.

    Attributes:
        hits, misses: lookups that found their expert there, and that did not.
        moved: bytes that were read from it.
        busy: seconds of these reads.
        evicted: experts that made room.
    """

    hits: int = 0
    misses: int = 0
    moved: int = 0
    busy: float = 0.0
    evicted: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the lookups that found their expert; None without a lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    @property
    def rate(self) -> float | None:
        """GB/s while it was read; None if nothing was."""
        return self.moved / self.busy / 1e9 if self.busy else None


@dataclass
class ExpertIO:
    """Sums over what the experts of a run moved so far.

    Attributes:
        path: of the file.
        tiers: sums by tier.
        moved: bytes by tier and second.
        queue: transfers that were asked for and not done, at the end of each second.
        stalled: milliseconds of waiting by second.
        steps: number of steps.
        others: number of lines of each other kind.
    """

    path: Path
    tiers: dict[str, Tier] = field(default_factory=dict)
    moved: dict[str, dict[int, int]] = field(default_factory=dict)
    queue: dict[int, int] = field(default_factory=dict)
    stalled: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    others: Counter[str] = field(default_factory=Counter)
    _position: tuple[int, int] = (0, 0)
    _asked: int = 0

    def read_on(self) -> bool:
        """Read the lines that were added, and return whether there were any.

        The file is a ring: where it was replaced or cut, it is read anew.
        """
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                inode, offset = self._position
                if inode != about.st_ino or about.st_size < offset:
                    vars(self).update(vars(ExpertIO(self.path)))
                    offset = 0
                file.seek(offset)
                added = file.read()
        except OSError:
            return False
        whole = added[: added.rfind(b"\n") + 1]
        self._position = (about.st_ino, offset + len(whole))
        for line in whole.splitlines():
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
        return bool(whole)

    @property
    def stall_milliseconds(self) -> float | None:
        """Milliseconds of waiting in a step; None before the first step."""
        return sum(self.stalled.values()) / self.steps if self.steps else None

    def _add(self, line: dict) -> None:
        kind, second = line["kind"], int(line["t"] // SECONDS_OF_A_BIN)
        tier = self.tiers.setdefault(line["tier"], Tier()) if line.get("tier") else Tier()
        if kind == "hit":
            tier.hits += 1
        elif kind == "miss":
            tier.misses += 1
            self._asked += 1
        elif kind == "evict":
            tier.evicted += 1
        elif kind == "stall":
            self.stalled[second] = self.stalled.get(second, 0.0) + line["us"] / 1e3
        elif kind == "step":
            self.steps += 1
        elif kind == "prefetch":
            self._asked += 1
        elif kind == "load":
            self._asked = max(self._asked - 1, 0)
            tier.moved += line["bytes"]
            tier.busy += line["us"] / 1e6
            moved = self.moved.setdefault(line["tier"], {})
            moved[second] = moved.get(second, 0) + line["bytes"]
        else:
            self.others[str(kind)] += 1
        self.queue[second] = self._asked
