"""What a run over pairs or judged answers shows: the same in its file, the bar, a tracker, the
report and evaluation.
"""

import base64
import re

import pytest

import runs
from chronicals.training.run.callbacks import read_metrics
from preferences import OF_ANSWERS, WITH_REFERENCE, rows_of

OF_BOTH = {f"{name}/{side}" for name in ("rewards", "logps") for side in ("chosen", "rejected")}
OF_PAIRS = {*OF_BOTH, "rewards/margins", "rewards/accuracies", "entropy"}
SHOWN = {
    **{name: {*OF_PAIRS, *(["kl"] if name in WITH_REFERENCE else [])} for name in OF_ANSWERS},
    "cpo": {*OF_PAIRS, "cpo", "cross_entropy"},
    "orpo": {*OF_PAIRS, "cross_entropy", "odds_ratio", "log_odds_ratio", "log_odds_chosen"},
    "reward": {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")},
    "kto": {*OF_BOTH, "rewards/margins", "entropy", "kl"},
}
"""Metrics by objective: those of pairs, unless it has others."""
STEPS = 4


def stored_in_tensorboard(folder):
    """Values by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    return {
        (tag, point.step): point.value
        for tag in events.Tags()["scalars"]
        for point in events.Scalars(tag)
    }


def told_after(step, said):
    """What the line of a step says, by name."""
    (line,) = [line for line in said.splitlines() if f"step {step}/{STEPS} · loss" in line]
    return dict(part.rsplit(" ", 1) for part in line.split(" · ")[1:] if " " in part)


def curves(page):
    """Titles of the panels; matplotlib writes each text as a comment before its outlines."""
    (figure,) = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    return set(re.findall(r"<!-- (.*?) -->", base64.b64decode(figure).decode()))


@pytest.mark.slow
@pytest.mark.draws
@pytest.mark.parametrize("objective", SHOWN)
def test_every_metric_is_everywhere(objective, tmp_path, capsys, caplog):
    pytest.importorskip("tensorboard")
    given = rows_of(objective, 32)
    result = runs.train(
        tmp_path,
        given,
        objective=objective,
        max_steps=STEPS,
        learning_rate=1e-3,
        validation_split=0.25,
        eval_steps=2,
        trackers=["tensorboard"],
    )
    said = capsys.readouterr().err + caplog.text
    expected = SHOWN[objective]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps, evaluations = (
        [line for line in lines if name in line] for name in ("loss", "eval_loss")
    )
    stored = stored_in_tensorboard(tmp_path)
    drawn = curves(result.report.read_text())
    assert len(steps) == STEPS and set(result.evaluation.others) == expected
    for name in expected:
        assert name in drawn
        for line in steps:
            assert stored[f"train/{name}", line["step"]] == pytest.approx(line[name], rel=1e-6)
        for line in evaluations:
            assert stored[f"eval/{name}", line["step"]] == pytest.approx(
                line[f"eval_{name}"], rel=1e-6
            )
        assert told_after(STEPS, said)[name] == f"{steps[-1][name]:.4g}"
        assert evaluations[-1][f"eval_{name}"] == pytest.approx(result.evaluation.others[name])
    assert steps[0]["rewards/margins"] == pytest.approx(
        steps[0]["rewards/chosen"] - steps[0]["rewards/rejected"], abs=1e-5
    )
