"""Ledger of a data set: the rows that were read, by kind, and how many of them are trained.

It is made once, when the data are opened; the log, the report and ``train --check`` render it.
Every row is either trained, held out or left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

UNRECOGNISED = "unrecognised"
"""The kind of rows whose fields identify none, or that cannot be read."""

LEDGER_COLUMNS = ("kind", "read", "trained", "held out", "left out", "why")
"""Names of the columns of ``Ledger.table``."""

RowCounts = Mapping[str, int]
"""Numbers of rows by kind, or by rule."""


@dataclass(frozen=True)
class Ledger:
    """Rows of one data set by kind.

    Attributes:
        read: all rows.
        trained: rows of which something is trained.
        held_out: rows that are only scored.
        left_out: rows that are neither, by kind and then by the gate's rule that says why.
        divided: number of ``trained`` that are texts in several pieces of which some are held out.

    Raises:
        ValueError: the sums do not agree.
    """

    read: RowCounts = field(default_factory=dict)
    trained: RowCounts = field(default_factory=dict)
    held_out: RowCounts = field(default_factory=dict)
    left_out: Mapping[str, RowCounts] = field(default_factory=dict)
    divided: int = 0

    def __post_init__(self) -> None:
        for kind in {*self.read, *self.trained, *self.held_out, *self.left_out}:
            read, trained, held_out, left_out = self._of_kind(kind)
            if read != trained + held_out + left_out:
                raise ValueError(
                    f"{kind}: {read} rows read, but {trained} trained, {held_out} held out and "
                    f"{left_out} left out"
                )

    def _of_kind(self, kind: str) -> tuple[int, int, int, int]:
        """Return the rows of a kind that were read, trained, held out and left out."""
        return (
            self.read.get(kind, 0),
            self.trained.get(kind, 0),
            self.held_out.get(kind, 0),
            sum(self.left_out.get(kind, {}).values()),
        )

    @property
    def causes(self) -> RowCounts:
        """Rows left out, by the gate's rule that says why, the most frequent first."""
        causes = Counter[str]()
        for counts in self.left_out.values():
            causes.update(counts)
        return dict(causes.most_common())

    @property
    def kinds(self) -> str:
        """Rows read, by kind, in words."""
        return _named(self.read)

    def words(self) -> str:
        """Return the ledger in one line; briefer if all rows are trained, or all held out."""
        read = sum(self.read.values())
        left_out = sum(self.causes.values())
        parts = []
        for fate, counts, others in (
            ("trained", self.trained, self.held_out),
            ("held out", self.held_out, self.trained),
        ):
            if counts and (others or left_out):
                by_kind = f" ({_named(counts)})" if len(counts) > 1 else ""
                parts.append(f"{sum(counts.values()):,}{by_kind} {fate}")
        if left_out:
            why = ", ".join(f"{count:,} {rule}" for rule, count in self.causes.items())
            parts.append(f"{left_out:,} left out ({why})")
        if self.divided:
            parts.append(f"{self.divided:,} of those trained are held out in part")
        became = f": {', '.join(parts)}" if parts else ""
        return f"{read:,} rows ({self.kinds}){became}" if read else "0 rows"

    def table(self) -> list[tuple[str, ...]]:
        """Return a row per kind in ``LEDGER_COLUMNS``, and one of sums if there are several."""
        rows = []
        for kind in sorted(self.read):
            why = ", ".join(
                f"{count:,} {rule}" for rule, count in self.left_out.get(kind, {}).items()
            )
            rows.append((kind, *(f"{count:,}" for count in self._of_kind(kind)), why))
        if len(rows) > 1:
            sums = [sum(counts) for counts in zip(*map(self._of_kind, self.read))]
            rows.append(("all", *(f"{count:,}" for count in sums), ""))
        return rows

    @property
    def is_scored(self) -> bool:
        """True if the data are held out as a whole."""
        return bool(self.held_out) and not self.trained


def _named(counts: RowCounts) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
