"""The gate before step 0: what the data holds, what was cut, and when training on it would be wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


class DataError(ValueError):
    """The data would make training wrong or impossible; the message names the place and the remedy."""


@dataclass
class DataReport:
    """Counts of one tokenised data set.

    Attributes:
        rows: records read.
        documents: documents stored (a long text becomes several).
        tokens: tokens stored.
        targets: tokens that are predicted and trained on.
        truncated: rows cut at ``max_seq_length``.
        split: long texts split into several documents.
        stop_cut: rows whose stop token was lost to the cut.
        masked: rows with nothing to train on, left out; by cause in ``masked_causes``.
        examples: for each finding, the first few row numbers.
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    truncated: int = 0
    split: int = 0
    stop_cut: int = 0
    masked: int = 0
    masked_causes: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[int]] = field(default_factory=dict)

    def note(self, finding: str, row: int) -> None:
        """Remember ``row`` (from 0) as an example of ``finding``."""
        rows = self.examples.setdefault(finding, [])
        if len(rows) < 5:
            rows.append(row + 1)

    def leave_out(self, cause: str, row: int) -> None:
        self.masked += 1
        self.masked_causes[cause] = self.masked_causes.get(cause, 0) + 1
        self.note(cause, row)

    def to_dict(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people; every count that is not zero, with the rows where it happened."""
        share = self.targets / max(self.tokens, 1)
        lines = [
            f"{self.rows:,} rows, {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.targets:,} of them trained ({share:.0%})"
        ]
        for finding, count in (
            ("truncated", self.truncated),
            ("stop token cut", self.stop_cut),
            ("split", self.split),
            *self.masked_causes.items(),
        ):
            if count:
                lines.append(f"{count:,} rows {finding} (rows {', '.join(map(str, self.examples.get(finding, [])))} …)")
        return lines

    def check(self, name: str, max_masked_rows: float) -> None:
        """Raise where training would be wrong.

        Raises:
            DataError: no row, nothing to train on, or too large a share of rows without a target.
        """
        if not self.rows:
            raise DataError(f"{name}: holds no rows; give a file with at least one")
        causes = "; ".join(self.lines()[1:]) or "every token is masked"
        if not self.targets:
            raise DataError(f"{name}: nothing to train on in any of {self.rows:,} rows: {causes}")
        if self.masked / self.rows > max_masked_rows:
            raise DataError(
                f"{name}: {self.masked:,} of {self.rows:,} rows have nothing to train on: {causes}. "
                f"Mend the rows, raise max_seq_length, or raise max_masked_rows (now {max_masked_rows})"
            )
