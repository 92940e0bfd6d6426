"""PatchReport: the parts that were replaced, where and by what, those left alone and why, and notes
for the user.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replaced:
    """A part that runs as a kernel now.

    Attributes:
        path: path of the module in the model.
        part: its class.
        by: name of its replacement.
    """

    path: str
    part: str
    by: str


@dataclass(frozen=True)
class Left:
    """A part that was left alone.

    Attributes:
        path: path of the module in the model; empty for a part of the whole model.
        part: its class, or the name of the part.
        reason: why it was left alone.
    """

    path: str
    part: str
    reason: str


@dataclass
class PatchReport:
    """The changes that ``patch_model`` made.

    Attributes:
        model: class of the model.
        replaced, left: entry of each module.
        notes: sentences about when a replacement is used, or what it skips.
        whole_layers: whether decoder layers were tried as wholes, too.
    """

    model: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole_layers: bool = False

    def mentions(self, part: str) -> bool:
        """Return whether ``part`` is in the report, replaced or left alone."""
        return part in {entry.part for entry in self.replaced} | {entry.part for entry in self.left}

    def counts(self) -> dict[str, int]:
        """Return the number of modules by the name of their replacement."""
        return dict(Counter(entry.by for entry in self.replaced))

    def __str__(self) -> str:
        rows = [("part", "modules", "now")]
        replaced = Counter((entry.part, entry.by) for entry in self.replaced)
        for (part, by), count in replaced.items():
            rows.append((part, str(count), by))
        left = Counter((entry.part, entry.reason) for entry in self.left)
        for (part, reason), count in left.items():
            rows.append((part, str(count), f"as it was: {reason}"))
        part_width = max(len(part) for part, _, _ in rows)
        count_width = max(len(count) for _, count, _ in rows)
        lines = [f"{part:{part_width}}  {count:>{count_width}}  {now}" for part, count, now in rows]
        return "\n".join([self.model, *lines, *self.notes])
