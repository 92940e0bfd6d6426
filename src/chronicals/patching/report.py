"""PatchReport: what was replaced, where, by what, what was left alone and why, and what a user
should know about it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replaced:
    """A part that runs as a kernel now.

    Attributes:
        path: of the module in the model.
        part: its class.
        by: what runs in its place.
    """

    path: str
    part: str
    by: str


@dataclass(frozen=True)
class Left:
    """A part that stays as it was, and why."""

    path: str
    part: str
    reason: str


@dataclass
class PatchReport:
    """What ``patch_model`` did.

    Attributes:
        model: class of the model.
        replaced, left: by module.
        notes: sentences about when a replacement is used, or what it skips.
        whole_layers: decoder layers were looked at as wholes, too.
    """

    model: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole_layers: bool = False

    def mentions(self, part: str) -> bool:
        """Whether ``part`` was looked at, be it replaced or left."""
        return part in {entry.part for entry in self.replaced} | {entry.part for entry in self.left}

    def counts(self) -> dict[str, int]:
        """How many modules run as what."""
        return dict(Counter(entry.by for entry in self.replaced))

    def __str__(self) -> str:
        rows = [("part", "modules", "now")]
        for (part, by), count in Counter((entry.part, entry.by) for entry in self.replaced).items():
            rows.append((part, str(count), by))
        for (part, reason), count in Counter(
            (entry.part, entry.reason) for entry in self.left
        ).items():
            rows.append((part, str(count), f"as it was: {reason}"))
        widths = [max(len(row[n]) for row in rows) for n in range(2)]
        lines = [f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows]
        return "\n".join([self.model, *lines, *self.notes])
