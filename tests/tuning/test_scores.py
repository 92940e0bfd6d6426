"""Scores of runs: cross-entropy alone, and speeds of steps that are the same."""

import pytest

from chronicals.standard_json import to_json
from chronicals.tuning.run_process import MetricsTail
from chronicals.tuning.scores import NoScore, held_out_score, speed_of, why_other_steps

LINES = [
    {"step": n, "loss": 2.0 / n, "grad_norm": 1.0 / n, "tokens_per_second": 100.0 + n}
    for n in range(1, 31)
]


def changed(**factors):
    return [
        {name: value * factors.get(name, 1.0) for name, value in line.items() if name != "step"}
        | {"step": line["step"]}
        for line in LINES
    ]


def test_the_loss_is_the_cross_entropy_alone():
    line = {"step": 9, "eval_loss": 5.0, "eval_cross_entropy": 2.0, "eval_router_balance": 3.0}
    assert held_out_score(line, "loss") == 2.0
    assert held_out_score({"step": 9, "eval_loss": 5.0}, "loss") == 5.0
    assert held_out_score(line, "router_balance") == 3.0


def test_a_metric_that_there_is_not_is_named_with_those_that_there_are():
    with pytest.raises(NoScore, match="metric='accuracy': evaluations have loss, perplexity"):
        held_out_score({"step": 1, "eval_loss": 1.0, "eval_perplexity": 2.0}, "accuracy")


def test_a_score_is_a_number():
    with pytest.raises(NoScore, match="is not a number"):
        held_out_score({"step": 1, "eval_loss": float("nan")}, "loss")


def test_a_speed_is_the_median_after_the_first_steps():
    slow_at_first = [
        {**line, "tokens_per_second": 1e6 if line["step"] <= 10 else line["tokens_per_second"]}
        for line in LINES
    ]
    assert speed_of(slow_at_first) == 120.5
    with pytest.raises(NoScore, match="19 steps were timed, and 20 are needed"):
        speed_of(slow_at_first[:-1])


@pytest.mark.parametrize(
    "factors, said",
    [
        ({}, None),
        ({"loss": 1.005, "grad_norm": 1.05}, None),
        ({"loss": 1.02}, "its loss deviates by 2.0% from that of trial 0"),
        ({"grad_norm": 0.8}, "its gradient norm deviates by 20.0% from that of trial 0"),
        ({"loss": float("nan")}, "its loss deviates by nan%"),
    ],
)
def test_other_steps_have_no_speed(factors, said):
    reason = why_other_steps(changed(**factors), LINES)
    assert reason is None if said is None else reason.startswith(said)


def test_all_steps_are_compared():
    assert "only 12 steps can be compared" in why_other_steps(LINES[:12], LINES)


def test_steps_that_both_skipped_are_the_same(tmp_path):
    """As fp16's loss scale does at first; ``metrics.jsonl`` has ``null`` for such a norm."""
    path = tmp_path / "metrics.jsonl"
    skipped = [{**line, "grad_norm": float("inf")} if line["step"] < 3 else line for line in LINES]
    path.write_text("".join(to_json(line) + "\n" for line in skipped))
    read = MetricsTail(path).look()
    assert why_other_steps(read, read) is None
    assert why_other_steps(read, LINES).startswith("its gradient norm deviates by nan%")
    assert why_other_steps(LINES, read).startswith("its gradient norm deviates by nan%")


def test_a_loss_that_is_not_finite_is_no_score(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json({"step": 1, "eval_loss": float("inf")}) + "\n")
    with pytest.raises(NoScore, match="is not a number"):
        held_out_score(MetricsTail(path).look()[0], "loss")
