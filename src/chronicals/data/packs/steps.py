"""Steps: what a run trains on, an optimizer step at a time, and where it stands in that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from chronicals.batch import Batch

Counts = Mapping[str, int | float]
"""What a step holds on all ranks together, by name, known before it is computed. Always there:

- ``targets``: positions that are trained;
- ``tokens``: documents' tokens, filler not counted;
- ``documents``, ``items``: of the data (an item is one or more documents, as a pair of answers is);
- ``first_targets``: those of the items' first documents;
- ``packs``: those with a document;
- ``slots``: positions, filler included.

``weight``, the sum of the weights of the targets, is there where Batches have weights;
``good_items`` and ``bad_items`` where rows may judge their answers, with ``mismatched_items``:
those that have an answer to another prompt.
"""


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of one optimizer step.

    Attributes:
        batches: as many as there are accumulation steps.
        counts: of the whole step, all ranks.
        began, state: where it begins and where it ends, for ``Steps``.
    """

    batches: list[Batch]
    counts: Counts
    began: Any
    state: Any


class Steps(Protocol):
    """Where a run's steps come from: packs of a store, or what a model itself writes.

    A state says how far the run has come. It can be written as JSON, and only the ``Steps`` that
    gave it reads it; None is the beginning.
    """

    @property
    def data(self) -> str:
        """A name of what the steps are made of: another content has another name."""

    @property
    def earlier_data(self) -> Collection[str]:
        """Names that earlier versions of this package gave to the same content."""

    @property
    def fingerprint(self) -> str:
        """Of the order in which data come; a state means the same wherever the fingerprint is
        the same.
        """

    def steps(self, state: Any = None, count: int | None = None) -> Iterator[Step]:
        """The steps from ``state`` on; they end after ``count``, if given."""

    def epoch(self, state: Any) -> float:
        """Passes over the data up to ``state``."""

    def left(self, state: Any) -> int | None:
        """Steps from ``state`` to the last; None without end."""
