"""No speed without proof: parity with the fp32 reference, gradients, and weights that moved."""

import math

import pytest
from made import measurement

from chronicals.benchmark.parity import Tolerance, comparison, refusal


def changed(values, step, factor):
    return [value * factor if number == step else value for number, value in enumerate(values)]


REFERENCE = measurement()


def test_an_arm_that_trains_as_the_reference_does_has_a_speed():
    assert refusal(measurement(), REFERENCE, Tolerance()) is None


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"losses": changed(REFERENCE.losses, 3, 1.02)}, "step 4: loss"),
        ({"losses": changed(REFERENCE.losses, 0, 1.007)}, "step 1: loss"),
        ({"grad_norms": changed(REFERENCE.grad_norms, 2, 0.8)}, "step 3: gradient norm"),
        ({"grad_norms": changed(REFERENCE.grad_norms, 4, 0.0)}, "a gradient is zero"),
        ({"grad_norms": changed(REFERENCE.grad_norms, 4, math.nan)}, "gradient norm is not finite"),
        ({"losses": changed(REFERENCE.losses, 4, math.inf)}, "loss is not finite"),
        ({"grad_norms": [None] * 5}, "reports no gradient norm"),
        ({"moved_share": 0.0}, "no weight changed"),
    ],
)
def test_a_wrong_arm_has_none(wrong, reason):
    assert reason in refusal(measurement(**wrong), REFERENCE, Tolerance())


@pytest.mark.parametrize("name", ["losses", "grad_norms"])
def test_a_reference_that_is_no_number_refuses(name):
    broken = measurement(**{name: changed(getattr(REFERENCE, name), 1, math.nan)})
    assert "step 2" in refusal(measurement(), broken, Tolerance())


def test_without_a_reference_there_is_no_speed():
    assert "no reference" in refusal(measurement(), None, Tolerance())


def test_steps_that_an_arm_does_not_report_are_not_compared():
    assert refusal(measurement(losses=[7.0, None, None, None, 6.6]), REFERENCE, Tolerance()) is None


@pytest.mark.parametrize("name, word", [("losses", "loss"), ("grad_norms", "gradient norm")])
def test_an_arm_that_reports_none_of_the_compared_steps_has_no_speed(name, word):
    """Later ones, which nothing is set beside, prove nothing."""
    late = measurement(steps=8, **{name: [None] * 5 + [99.0] * 3})
    assert f"no {word} of the first 5 steps" in refusal(late, REFERENCE, Tolerance())


def test_dropout_widens_the_norms_alone():
    noisy = measurement(grad_norms=changed(REFERENCE.grad_norms, 2, 1.15))
    assert (
        refusal(noisy, REFERENCE, Tolerance())
        and refusal(noisy, REFERENCE, Tolerance(), dropout=True) is None
    )
    wrong = measurement(losses=changed(REFERENCE.losses, 2, 1.015))
    assert refusal(wrong, REFERENCE, Tolerance(), dropout=True)


def test_the_record_has_both_sides():
    found = comparison(measurement(losses=changed(REFERENCE.losses, 1, 1.01)), REFERENCE)
    assert found["loss"]["largest_deviation"] == pytest.approx(0.01)
    assert found["grad_norm"]["measured"] == found["grad_norm"]["reference"] == REFERENCE.grad_norms


def test_a_loss_that_bf16_itself_changes_may_deviate_three_times_as_much():
    """In any of the compared steps, and norms no more than before."""
    rounded = measurement(rounded_losses=changed(REFERENCE.losses, 1, 1.02))
    assert (
        refusal(measurement(losses=changed(REFERENCE.losses, 3, 1.05)), rounded, Tolerance())
        is None
    )
    assert "step 4: loss" in refusal(
        measurement(losses=changed(REFERENCE.losses, 3, 1.07)), rounded, Tolerance()
    )
    assert "step 3: gradient norm" in refusal(
        measurement(grad_norms=changed(REFERENCE.grad_norms, 2, 0.8)), rounded, Tolerance()
    )
    assert (
        comparison(measurement(), rounded)["loss"]["reference_in_bf16"]
        == rounded.rounded_losses[:5]
    )


def test_so_may_a_loss_that_bf16_is_expected_to_change():
    """The sum of what it changes in each pair may be near zero where single changes are not.
    Norms may no more than before.
    """
    lucky = measurement(
        rounded_losses=REFERENCE.losses, rounding_spreads=[0.0, 0.02 * REFERENCE.losses[1], 0.0]
    )
    assert (
        refusal(measurement(losses=changed(REFERENCE.losses, 3, 1.05)), lucky, Tolerance()) is None
    )
    assert "step 4: loss" in refusal(
        measurement(losses=changed(REFERENCE.losses, 3, 1.07)), lucky, Tolerance()
    )
    large = measurement(rounding_spreads=[0.1 * REFERENCE.losses[0]])
    assert "step 3: gradient norm" in refusal(
        measurement(grad_norms=changed(REFERENCE.grad_norms, 2, 0.8)), large, Tolerance()
    )
    assert comparison(measurement(), lucky)["loss"]["expected_of_bf16"] == lucky.rounding_spreads
    assert "expected_of_bf16" not in comparison(measurement(), REFERENCE)["loss"]


def test_so_may_a_norm_that_bf16_itself_changes():
    """Losses no more than before."""
    rounded = measurement(rounded_norms=changed(REFERENCE.grad_norms, 1, 1.04))
    assert (
        refusal(
            measurement(grad_norms=changed(REFERENCE.grad_norms, 0, 0.89)), rounded, Tolerance()
        )
        is None
    )
    assert "step 1: gradient norm" in refusal(
        measurement(grad_norms=changed(REFERENCE.grad_norms, 0, 0.87)), rounded, Tolerance()
    )
    assert "step 3: loss" in refusal(
        measurement(losses=changed(REFERENCE.losses, 2, 1.02)), rounded, Tolerance()
    )
    assert (
        comparison(measurement(), rounded)["grad_norm"]["reference_in_bf16"]
        == rounded.rounded_norms[:5]
    )
