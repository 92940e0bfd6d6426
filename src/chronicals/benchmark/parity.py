"""Comparison of an arm with the plain fp32 reference; an arm that deviates has no speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chronicals.benchmark.measurement import COMPARED, Measurement


@dataclass(frozen=True)
class Tolerance:
    """Relative deviations allowed in the first steps.

    In the very first, before any update, half as much is allowed.

    If bf16 alone changes the reference by a lot, as DPO's loss, a difference of large sums, the
    allowed deviation is ``_ROUNDING_FACTOR`` times that change.

    Attributes:
        loss: of the loss.
        grad_norm: of the norm of all gradients before clipping; doubled under dropout, whose noise
            is in it.
    """

    loss: float = 0.01
    grad_norm: float = 0.10


_ROUNDING_FACTOR = 3.0
"""Allowed deviation, as a multiple of the reference's own change by bf16."""


def refusal(
    measured: Measurement,
    reference: Measurement | None,
    tolerance: Tolerance,
    dropout: bool = False,
) -> str | None:
    """Return why the arm's speed may not be printed; None if it may.

    Reasons are zero or non-finite gradients or losses in any step; weights that did not change;
    first losses or gradient norms that are not reported or differ from the reference by more than
    the tolerance; and a missing reference. Of several rounds in one process only the first has
    steps to compare.
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
    loss_rounding = _largest_deviation(reference.rounded_losses or [], reference.losses)
    for spread, loss in zip(reference.rounding_spreads or [], reference.losses[:COMPARED]):
        if loss:
            loss_rounding = max(loss_rounding, spread / abs(loss))
    norm_rounding = _largest_deviation(reference.rounded_norms or [], reference.grad_norms)
    return _deviation(
        "loss", measured.losses, reference.losses, tolerance.loss, loss_rounding
    ) or _deviation(
        "gradient norm",
        measured.grad_norms,
        reference.grad_norms,
        tolerance.grad_norm * (2.0 if dropout else 1.0),
        norm_rounding,
    )


def _deviation(
    name: str,
    values: Sequence[float | None],
    references: Sequence[float | None],
    tolerance: float,
    rounding: float,
) -> str | None:
    """Return where a quantity deviates from its reference by more than it may; None if it does not.

    Args:
        name: of the quantity, for the text.
        values: of the arm, by step; None is not reported.
        references: of the reference, by step.
        tolerance: relative deviation that is allowed, half as much in the first step.
        rounding: relative change of the reference by its own bf16, of which a multiple is allowed.
    """
    exact = references[:COMPARED]
    pairs = [
        (step, value, reference)
        for step, (value, reference) in enumerate(zip(values, exact), 1)
        if value is not None and reference is not None
    ]
    if not pairs:
        return f"it reports no {name} of the first {len(exact)} steps, which the reference has"
    for step, value, reference in pairs:
        limit = max(tolerance / 2 if step == 1 else tolerance, _ROUNDING_FACTOR * rounding)
        if not abs(value - reference) <= limit * abs(reference):  # true for a NaN, too
            return (
                f"step {step}: {name} {value:.4f} where the fp32 reference has {reference:.4f} "
                f"(more than {limit:.1%} apart)"
            )
    return None


def comparison(measured: Measurement, reference: Measurement | None) -> dict[str, Any]:
    """Return the compared losses and gradient norms side by side, for the record."""
    if reference is None:
        return {}
    result = {
        "loss": _side_by_side(measured.losses, reference.losses, reference.rounded_losses),
        "grad_norm": _side_by_side(
            measured.grad_norms, reference.grad_norms, reference.rounded_norms
        ),
    }
    if reference.rounding_spreads is not None:
        result["loss"]["expected_of_bf16"] = reference.rounding_spreads[:COMPARED]
    return result


def _side_by_side(
    values: Sequence[float | None],
    references: Sequence[float | None],
    rounded: Sequence[float] | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "measured": list(values[:COMPARED]),
        "reference": list(references[:COMPARED]),
        "largest_deviation": _largest_deviation(values, references),
    }
    if rounded is not None:
        result["reference_in_bf16"] = rounded[:COMPARED]
    return result


def _largest_deviation(values: Sequence[float | None], references: Sequence[float | None]) -> float:
    """Return the largest relative deviation of a compared step; 0 if there is none."""
    deviations = [
        abs(value - reference) / abs(reference)
        for value, reference in zip(values, references[:COMPARED])
        if value is not None and reference
    ]
    return max(deviations, default=0.0)
