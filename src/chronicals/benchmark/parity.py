"""Whether an arm trained as the plain fp32 reference does; if not, it has no speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chronicals.benchmark.measurement import COMPARED, Measurement


@dataclass(frozen=True)
class Tolerance:
    """Relative deviations allowed in the first steps; half as much in the very first, before any
    update.

    Attributes:
        loss: of the loss.
        grad_norm: of the norm of all gradients before clipping; doubled under dropout, whose noise
            is in it.

    Where a loss is a difference of large sums, as DPO's, either may deviate by ``OF_ROUNDING``
    times what bf16 alone changes: in the compared steps, or, of the loss, as its changes in single
    pairs let expect.
    """

    loss: float = 0.01
    grad_norm: float = 0.10


OF_ROUNDING = 3.0
"""Deviation as a multiple of what the reference's own bf16 changes."""


def refusal(
    measured: Measurement,
    reference: Measurement | None,
    tolerance: Tolerance,
    dropout: bool = False,
) -> str | None:
    """Why the arm's speed may not be printed; None if it may.

    Reasons: zero or non-finite gradients or losses in any step, weights that did not change, first
        losses or gradient norms
    that differ from the reference by more than the tolerance or are not reported, or no reference.
    Of several rounds in one process only the first has steps to compare.
    """
    norms = [norm for norm in measured.grad_norms if norm is not None]
    losses = [loss for loss in measured.losses if loss is not None]
    for name, values in (("gradient norm", norms), ("loss", losses)):
        if not values:
            return f"it reports no {name}"
        if not all(math.isfinite(value) for value in values):
            return f"a {name} is not finite"
    if not all(norms):
        return "a gradient is zero: nothing is trained"
    if not measured.moved_share:
        return "no weight changed: nothing is trained"
    if not measured.first:
        return None
    if reference is None:
        return "there is no reference to set its losses beside"
    factor = 2.0 if dropout else 1.0
    expected = {
        "loss": _largest_share(reference.rounding_spreads or [], reference.losses),
        "gradient norm": 0.0,
    }
    for name, own, exact, allowed, rounded in (
        ("loss", measured.losses, reference.losses, tolerance.loss, reference.rounded_losses),
        (
            "gradient norm",
            measured.grad_norms,
            reference.grad_norms,
            tolerance.grad_norm * factor,
            reference.rounded_norms,
        ),
    ):
        least = OF_ROUNDING * max(_largest_deviation(rounded or [], exact), expected[name])
        pairs = [
            (step, a, b)
            for step, (a, b) in enumerate(zip(own, exact[:COMPARED]), 1)
            if a is not None and b is not None
        ]
        if not pairs:
            return (
                f"it reports no {name} of the first {len(exact[:COMPARED])} steps, which the "
                "reference has"
            )
        for step, a, b in pairs:
            limit = max(allowed / 2 if step == 1 else allowed, least)
            if not abs(a - b) <= limit * abs(b):  # also true where the reference is NaN
                return (
                    f"step {step}: {name} {a:.4f} where the fp32 reference has {b:.4f} (more "
                    f"than {limit:.1%} apart)"
                )
    return None


def comparison(measured: Measurement, reference: Measurement | None) -> dict[str, Any]:
    """The compared losses and gradient norms side by side, for the record."""
    if reference is None:
        return {}
    pairs = {
        "loss": (measured.losses, reference.losses),
        "grad_norm": (measured.grad_norms, reference.grad_norms),
    }
    found: dict[str, Any] = {
        name: {
            "measured": list(own[:COMPARED]),
            "reference": list(exact[:COMPARED]),
            "largest_deviation": _largest_deviation(own, exact),
        }
        for name, (own, exact) in pairs.items()
    }
    for name, rounded in (
        ("loss", reference.rounded_losses),
        ("grad_norm", reference.rounded_norms),
    ):
        if rounded is not None:
            found[name]["reference_in_bf16"] = rounded[:COMPARED]
    if reference.rounding_spreads is not None:
        found["loss"]["expected_of_bf16"] = reference.rounding_spreads[:COMPARED]
    return found


def _largest_share(parts: Sequence[float], wholes: Sequence[float | None]) -> float:
    """Of the compared steps; 0 where there are none."""
    return max(
        (part / abs(whole) for part, whole in zip(parts, wholes[:COMPARED]) if whole), default=0.0
    )


def _largest_deviation(own: Sequence[float | None], exact: Sequence[float | None]) -> float:
    """Relative, of the compared steps; 0 where there are none."""
    return max(
        (abs(a - b) / abs(b) for a, b in zip(own, exact[:COMPARED]) if a is not None and b),
        default=0.0,
    )
