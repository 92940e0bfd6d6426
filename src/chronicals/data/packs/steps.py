"""Steps: the data of a run, an optimizer step at a time, and its place in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from chronicals.batch import Batch

StepCounts = Mapping[str, int | float]
"""Numbers of a step on all ranks together, by name, known before it is computed.

Always there are:

- ``targets``: positions that are trained;
- ``tokens``: documents' tokens, filler not counted;
- ``documents``, ``items``: of the data (an item is one or more documents, as a pair of answers is);
- ``first_targets``: those of the items' first documents;
- ``packs``: those with a document;
- ``slots``: positions, filler included.

If Batches have weights, there is ``weight``, the sum of the weights of the targets. If rows may
judge their answers, there are ``good_items``, ``bad_items``, and ``mismatched_items``: those that
have an answer to another prompt.

If the model draws the answers, there are ``answers``, and ``new_targets``, the targets that were
drawn with the present weights.
"""


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of one optimizer step.

    Attributes:
        batches: one for each accumulation step.
        counts: of the whole step, all ranks.
        began: state at its beginning.
        state: state at its end.
        shown: metrics that are known before it is computed, by name.
    """

    batches: list[Batch]
    counts: StepCounts
    began: Any
    state: Any
    shown: Mapping[str, float] = field(default_factory=dict)


class Steps(Protocol):
    """A source of a run's steps: packs of a store, or texts that a model itself writes.

    A state says how far the run has come. It can be written as JSON, and only the ``Steps`` that
    gave it reads it; None is the beginning.

    Attributes:
        data: name of the content that the steps are made of: another content has another name.
        earlier_data: names that earlier versions of this package gave to the same content.
    """

    data: str
    earlier_data: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of the order in which data come: with the same one, a state means the same."""

    def steps(self, state: Any = None, count: int | None = None) -> Iterator[Step]:
        """Yield the steps from ``state`` on; they end after ``count``, if given."""

    def heaviest(self) -> Step:
        """Return a step of the longest documents, which has no place in the run."""

    def epoch(self, state: Any) -> float:
        """Return the passes over the data up to ``state``."""

    def left(self, state: Any) -> int | None:
        """Return the steps from ``state`` to the last; None without end."""
