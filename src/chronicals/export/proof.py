"""What shows that an artefact is the model that was trained: checks with a measure and a bound,
stored beside it as JSON.
"""

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
        name: what is compared.
        client: the program that read the artefact.
        passed: None where it was not run, or is reported without a bound.
        value, bound: the measure, and what it may be.
        detail: in words.
    """

    name: str
    client: str
    passed: bool | None
    value: float | None = None
    bound: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        said = {
            True: "passed",
            False: "FAILED",
            None: "not run" if self.value is None else "reported",
        }[self.passed]
        measured = "" if self.value is None else f" {self.value:.3g}"
        limit = "" if self.bound is None else f" (bound {self.bound:.3g})"
        return (
            f"{self.name}, {self.client}: "
            f"{said}{measured}{limit}{': ' if self.detail else ''}{self.detail}"
        )


@dataclass
class Proof:
    """The checks of an artefact.

    Attributes:
        about: what was written of what, as plain JSON.
    """

    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    def equal(self, name: str, client: str, expected: Any, found: Any) -> None:
        """Adds whether two things are equal; where not, the first difference of sequences."""
        detail = "" if expected == found else _difference(expected, found)
        self.checks.append(Check(name, client, expected == found, detail=detail))

    def bounded(self, name: str, client: str, value: float, bound: float, detail: str = "") -> None:
        self.checks.append(Check(name, client, value <= bound, value, bound, detail))  # NaN is not

    def reported(self, name: str, client: str, value: float, detail: str = "") -> None:
        self.checks.append(Check(name, client, None, value, detail=detail))

    def not_run(self, name: str, client: str, reason: str) -> None:
        self.checks.append(Check(name, client, None, detail=reason))

    def write(self, file: Path) -> None:
        file.write_text(
            to_json({**self.about, "checks": [asdict(check) for check in self.checks]}, indent=1)
        )

    def require(self, what: Path) -> None:
        """Raises NotProved where a check failed."""
        if self.failed:
            raise NotProved(
                f"{what}: is not the trained model, and was not kept: "
                f"{'; '.join(map(str, self.failed))}"
            )


def _difference(expected: Any, found: Any) -> str:
    if (
        isinstance(expected, Sequence)
        and isinstance(found, Sequence)
        and not isinstance(expected, str)
    ):
        place = next(
            (n for n, (a, b) in enumerate(zip(expected, found)) if a != b),
            min(len(expected), len(found)),
        )
        return (
            f"from place {place}: expected {list(expected[place : place + 4])}, found "
            f"{list(found[place : place + 4])}"
        )
    return f"expected {json.dumps(expected)[:80]}, found {json.dumps(found)[:80]}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of Frobenius norms; infinite where shapes differ, or something is not a number."""
    if found.shape != expected.shape:
        return math.inf
    found = found.float()
    expected = expected.float()
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error  # of which ``max`` would not hear


ROUNDED_ONCE = 2e-4
"""Of a tensor of 16 bits beside the trained one rounded once to its type, relative; and of
codes, the ratio that differ. Sums that were rounded to bf16 before are beyond it: 1e-3 in fp16,
2e-3 and more of the codes of any type."""

SUMMED = 1e-6
"""The same of a tensor in fp32, relative: what another order of sums changes."""


def beside_rounded(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The difference of a tensor that was written from what its trained weights become in the
    same dtype, and its bound.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf, ROUNDED_ONCE
    if found.is_floating_point() and found.element_size() > 1:
        return relative_error(found, expected), SUMMED if found.element_size() > 2 else ROUNDED_ONCE
    codes, others = (x.contiguous().view(-1).view(torch.uint8) for x in (found, expected))
    return float((codes != others).float().mean()) if len(codes) else 0.0, ROUNDED_ONCE


def largest_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Of several tensors, such as the logits of several documents."""
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))


def cross_entropy(logits: Tensor, ids: list[int]) -> float:
    """Of each token after the first, nats."""
    return float(
        torch.nn.functional.cross_entropy(
            logits[:-1].float(), torch.tensor(ids[1:], device=logits.device)
        )
    )
