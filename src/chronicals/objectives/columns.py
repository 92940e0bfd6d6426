"""Declarations of what an objective needs before the first step: columns and a reference policy.

``chronicals/training/columns/stored_columns.py`` computes the columns, caches them, and checks on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.models import PresentedModel

REFERENCE_POLICY = "reference"
"""Name of the column of log-probabilities under the reference, and of a frozen reference model."""

ReferenceRecord = Mapping[str, Any]
"""JSON description of a run's reference policy.

``how`` is ``adapters_off``, ``stored`` or ``reference_model``. ``start`` and ``identity`` describe
a model that can be found again. ``in_4bit`` is set if that model was in 4 bits.
"""


@dataclass(frozen=True)
class Column:
    """A column of the data.

    Attributes:
        name: key in ``Batch.segments`` (values of documents) or ``Batch.tokens`` (values of
            targets), and in the stored files.
        dtype: of its values.
        shape: of one value; a document's is a scalar.
    """

    name: str
    dtype: type[np.generic]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Columns:
    """Columns that one pass of one model over the data computes together.

    Attributes:
        name: role of the model, such as ``teacher``: in logs, and the ending of stored files. The
            stored files of two declarations differ in it or in ``identity``.
        content: what the values are, in the plural, for logs: ``predictions``.
        per: whether documents or targets have values.
        columns: in the order in which ``compute`` gives their values.
        compute: ``(model, batch, generator)`` → tensors ``[n, *shape]``, one for each column, for
            the first n documents (or targets) of the Batch, then for the next ones, until all have
            values. It is called under ``torch.no_grad()`` with a model that does not drop out; the
            generator is seeded.
        load: returns the frozen transformers model that computes the values; None for the trained
            model as the run begins.
        identity: JSON: what the values depend on beside the documents and the trained model, such
            as the files of the frozen model and settings.
        setting: field that asks for the columns, with its value, for error messages.
    """

    name: str
    content: str
    per: Literal["document", "target"]
    columns: tuple[Column, ...]
    compute: Callable[[PresentedModel, Batch, torch.Generator], Iterable[tuple[Tensor, ...]]]
    load: Callable[[], Any] | None = None
    identity: Any = None
    setting: str = ""

    def __post_init__(self) -> None:
        if self.per == "document" and any(column.shape for column in self.columns):
            raise ValueError(
                f"{self.name}: a document has one number in a column; shape must be ()"
            )


@dataclass(frozen=True)
class ReferencePolicy:
    """The model that an objective compares the trained one with.

    Attributes:
        record: written beside the trained model, so that an evaluation finds the same policy.
        weights: some of its parameters, by which a resumed run recognises it. They are not compared
            if a column of the trained model is stored: then all weights are.
    """

    record: ReferenceRecord
    weights: tuple[Tensor, ...] = ()

    def difference(self, earlier: ReferenceRecord) -> str | None:
        """Return why the run had its policy in another way in its ``earlier`` part; else None."""
        if earlier["how"] == self.record["how"]:
            return None
        before, now = (
            f"reference_model={record.get('start')!r}"
            if record["how"] == "reference_model"
            else f"reference={record['how']!r}"
            for record in (earlier, self.record)
        )
        return (
            f"the run's reference policy is {before}, and now it would be {now}; resume with the "
            "setting that it began with"
        )
