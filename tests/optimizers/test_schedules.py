"""Learning-rate factors."""

import itertools
import math

import pytest

from chronicals.optimizers import SCHEDULES, learning_rate_factor

RUNS = [(1000, 100), (10, 0), (10, 10), (7, 3), (1, 0), (1, 1), (13, 12)]


def factors(schedule, total, warmup, **options):
    return [learning_rate_factor(schedule, step, total, warmup, **options) for step in range(total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total, warmup", RUNS)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_what_all_have_in_common(schedule, total, warmup, floor):
    run = factors(schedule, total, warmup, min_ratio=floor)
    rising = run[:warmup]
    falling = run[warmup:]
    assert rising == [pytest.approx((step + 1) / warmup, abs=1e-15) for step in range(warmup)]
    assert all(factor > 0 for factor in rising), "the warm-up is never 0"
    assert not rising or rising[-1] == 1
    assert not falling or falling[0] == 1
    assert all(later <= earlier for earlier, later in itertools.pairwise(falling))
    assert all(floor <= factor <= 1 for factor in falling)
    assert run[-1] > 0, "the last step is not wasted"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total, warmup", [(1000, 100), (10, 0), (7, 3)])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_end_is_reached_after_the_last_step(schedule, total, warmup, floor):
    assert learning_rate_factor(schedule, total, total, warmup, floor) == pytest.approx(
        floor, abs=1e-15
    )
    assert learning_rate_factor(schedule, total + 50, total, warmup, floor) == pytest.approx(
        floor, abs=1e-15
    )


def test_constant_stays():
    assert set(factors("constant", 50, 5)[5:]) == {1.0}
    assert learning_rate_factor("constant", 500, 50, 5, min_ratio=0.1) == 1.0


def test_cosine_and_linear_by_formula():
    for step in range(100, 1000, 37):
        progress = (step - 100) / 900
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate_factor("cosine", step, 1000, 100, 0.1) == pytest.approx(
            cosine, rel=1e-12
        )
        assert learning_rate_factor("linear", step, 1000, 100) == pytest.approx(
            1 - progress, rel=1e-12
        )


@pytest.mark.parametrize("decay", [0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("warmup", [0, 100])
def test_wsd_is_flat_and_then_falls_over_its_share_of_the_run(decay, warmup):
    """The last ``decay`` of all steps, warm-up included; whatever of that the warm-up leaves."""
    run = factors("wsd", 1000, warmup, decay_ratio=decay)
    begin = max(round(1000 * (1 - decay)), warmup)
    assert run[warmup : begin + 1] == [pytest.approx(1.0, abs=1e-12)] * (begin + 1 - warmup)
    slope = 1 / (1000 - begin)
    for step in range(begin, 1000):
        assert run[step] == pytest.approx(1 - (step - begin) * slope, abs=1e-9)


def test_names():
    assert set(SCHEDULES) == {"cosine", "linear", "constant", "wsd"}
    with pytest.raises(KeyError):
        learning_rate_factor("exponential", 5, 10, 0)
