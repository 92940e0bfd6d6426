"""Proof that an artefact is the trained model: checks with a measure and a bound, kept as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.standard_json import to_json


class NotProved(ValueError):
    """A check failed; the artefact was not given its name."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: of the comparison.
        client: the program that read the artefact.
        passed: None if it was not run, or is reported without a bound.
        value: the measure.
        bound: the largest value that passes.
        detail: in words.
    """

    name: str
    client: str
    passed: bool | None
    value: float | None = None
    bound: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.passed is None:
            result = "not run" if self.value is None else "reported"
        else:
            result = "passed" if self.passed else "FAILED"
        value = "" if self.value is None else f" {self.value:.3g}"
        bound = "" if self.bound is None else f" (bound {self.bound:.3g})"
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.name}, {self.client}: {result}{value}{bound}{detail}"


@dataclass
class Proof:
    """The checks of an artefact.

    Attributes:
        about: the artefact and the model that it was made of, as plain JSON.
    """

    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass; those that could not be run are not among them."""
        return [check for check in self.checks if check.passed is False]

    def equal(self, name: str, client: str, expected: Any, found: Any) -> None:
        """Add a check that two values are equal; of sequences it names the first difference."""
        detail = ""
        sequences = isinstance(expected, Sequence) and isinstance(found, Sequence)
        if expected != found and sequences and not isinstance(expected, str):
            place = min(len(expected), len(found))
            for n, (one, other) in enumerate(zip(expected, found)):
                if one != other:
                    place = n
                    break
            ours = list(expected[place : place + 4])
            theirs = list(found[place : place + 4])
            detail = f"from place {place}: expected {ours}, found {theirs}"
        elif expected != found:
            detail = f"expected {json.dumps(expected)[:80]}, found {json.dumps(found)[:80]}"
        self.checks.append(Check(name, client, expected == found, detail=detail))

    def bounded(self, name: str, client: str, value: float, bound: float, detail: str = "") -> None:
        """Add a check that a value is not above a bound; NaN fails."""
        self.checks.append(Check(name, client, value <= bound, value, bound, detail))

    def reported(self, name: str, client: str, value: float, detail: str = "") -> None:
        """Add a measure without a bound."""
        self.checks.append(Check(name, client, None, value, detail=detail))

    def not_run(self, name: str, client: str, reason: str) -> None:
        """Add a check that could not be run."""
        self.checks.append(Check(name, client, None, detail=reason))

    def write(self, file: Path) -> None:
        """Write what the artefact is made of, and all checks, as JSON."""
        file.write_text(
            to_json({**self.about, "checks": [asdict(check) for check in self.checks]}, indent=1)
        )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error in Frobenius norms; infinite if shapes differ, or for NaN."""
    if found.shape != expected.shape:
        return math.inf
    found = found.float()
    expected = expected.float()
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error  # max() would ignore a NaN


ROUNDED_ONCE = 2e-4
"""Bound on the relative error of a tensor of 16 bits beside the trained one rounded once, and on
the ratio of codes that differ. Sums that were rounded to bf16 before exceed it: 1e-3 in fp16, and
2e-3 or more of the codes of any type.
"""

SUMMED = 1e-6
"""The same bound for a tensor in fp32, where another order of sums changes values."""


def largest_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative error of several tensors, such as logits of documents."""
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))


def cross_entropy(logits: Iterable[Tensor], documents: Iterable[list[int]]) -> float:
    """Return the mean cross-entropy of the tokens after the first of documents, nats."""
    total = 0.0
    count = 0
    for of_document, ids in zip(logits, documents, strict=True):
        targets = torch.tensor(ids[1:], device=of_document.device)
        mean = torch.nn.functional.cross_entropy(of_document[:-1].float(), targets)
        total += float(mean) * len(targets)
        count += len(targets)
    return total / count
