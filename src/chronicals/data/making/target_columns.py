"""Columns of values for every target of a store, which a Batch holds at the target's position.

A column has a row for each target, document after document, so it may be a file that is mapped into
memory. A teacher's stored predictions are one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class TargetColumn:
    """Values of the targets of some documents.

    Attributes:
        values: ``[rows, ...]``, the values of each document's targets in their order.
        starts: int64 ``[documents]``, first row of each document.
        counts: int64 ``[documents]``, targets of each document.
    """

    values: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, counts: np.ndarray) -> TargetColumn:
        """Return the column of a store.

        Args:
            values: ``[targets in all, ...]``.
            counts: int64 ``[documents]``, targets of each document.

        Raises:
            ValueError: there are more or fewer values than targets.
        """
        if len(values) != counts.sum():
            raise ValueError(f"{len(values)} values for {counts.sum()} targets")
        return cls(values, np.cumsum(counts) - counts, counts)

    def subset(self, indices: np.ndarray) -> TargetColumn:
        """Return the column of some of the documents, over the same values."""
        return replace(self, starts=self.starts[indices], counts=self.counts[indices])

    def rows(self, documents: np.ndarray) -> np.ndarray:
        """Return the rows of these documents' targets, one behind the other, int64."""
        counts = self.counts[documents]
        before = np.cumsum(counts) - counts
        return np.repeat(self.starts[documents] - before, counts) + np.arange(counts.sum())

    def laid(self, documents: np.ndarray, is_target: np.ndarray) -> np.ndarray:
        """Return the values at the targets of a Batch, zero elsewhere, ``[T, ...]``.

        Args:
            documents: int64, the documents of the Batch in their order.
            is_target: bool ``[T]``.
        """
        column = np.zeros((len(is_target), *self.values.shape[1:]), self.values.dtype)
        column[is_target] = self.values[self.rows(documents)]
        return column
