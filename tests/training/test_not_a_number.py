"""What is not a number stops a run, and is written as null."""

import json
import math
import re

import pytest

import runs
import tiny
from chronicals.training import Callback, ChronicalsTrainer, TrainingError
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.run_state import Run
from chronicals.training.step import precision
from comparison import equal

SEEN = [{"input_ids": [3 + (i + j) % 200 for j in range(20)]} for i in range(20)]
UNSEEN = 299


def damaged():
    """Its states are no numbers where the token ``UNSEEN`` stands."""
    model = tiny.llama(tie_word_embeddings=False)
    model.get_input_embeddings().weight.data[UNSEEN] = math.nan
    return model


def read(path):
    """As JSON, and nothing beyond."""

    def refuse(name):
        raise AssertionError(f"{path.name} holds {name}")

    return [json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines()]


@pytest.mark.parametrize("when", [{}, {"eval_steps": 2}], ids=["at the end", "midway"])
def test_a_held_out_loss_that_is_not_a_number_stops_the_run(tmp_path, when):
    with pytest.raises(
        TrainingError,
        match=f"held-out loss after step {when.get('eval_steps', 6)}: nan, not a number",
    ):
        runs.train(
            tmp_path, SEEN, damaged(), eval_rows=[{"input_ids": [5, 6, UNSEEN, 7, 8]}], **when
        )
    assert not (tmp_path / "run" / "model").exists()
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == when.get("eval_steps", 6)


class Overflow(Callback):
    def __init__(self, skipped):
        self.skipped = skipped

    def step_done(self, metrics):
        self.skipped.append(metrics.skipped)


def overflowing(folder, monkeypatch, **changes):
    """A run in fp16 with a loss scale that is far too high; which of its steps were skipped."""
    monkeypatch.setattr(precision, "START_SCALE", 2.0**60)
    skipped = []
    runs.train(folder, mixed_precision="fp16", callbacks=[Overflow(skipped)], **changes)
    return skipped


def test_a_run_of_which_no_step_was_applied_is_not_finished(tmp_path, monkeypatch):
    model = tiny.llama()
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(
        TrainingError,
        match=r"none of the 6 steps was applied.*fallen to 1.80144e\+16.*mixed_precision='bf16'",
    ):
        overflowing(tmp_path, monkeypatch, model=model)
    assert all(equal(a, b) for a, b in zip(before, model.parameters()))
    assert not (tmp_path / "run" / "model").exists()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["grad_norm"] for line in lines] == [None] * 6
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text(), parse_constant=pytest.fail)["best_loss"] is None


def test_steps_that_were_skipped_count_on_after_a_resume(tmp_path, monkeypatch):
    """The scale goes on falling from where it was; and a run that then trains is audited and
    finishes.
    """
    for steps in (6, 12):
        scale = re.escape(f"{2.0 ** (60 - steps):g}")
        with pytest.raises(
            TrainingError, match=f"none of the {steps} steps was applied.*fallen to {scale}"
        ):
            overflowing(tmp_path, monkeypatch, resume=steps > 6, max_steps=steps)
    with pytest.raises(TrainingError, match="step 21: gradient norm"):
        overflowing(tmp_path, monkeypatch, resume=True, max_steps=40)


def test_a_step_applied_after_a_resume_is_audited(tmp_path, monkeypatch, set_constants):
    set_constants(precision, START_SCALE=2.0**60)
    with pytest.raises(TrainingError):
        runs.train(tmp_path, mixed_precision="fp16", max_steps=2)
    state = next((tmp_path / "run" / "checkpoints").glob("*/state.json"))
    monkeypatch.setattr(
        precision.Precision, "load_state", lambda self, state: self.scale.fill_(2.0**16)
    )
    result = runs.train(tmp_path, mixed_precision="fp16", max_steps=4, resume=True)
    assert result.coverage is not None and result.steps == 4
    assert json.loads(state.read_text())["applied"] == 0


def test_a_loss_that_overflows_stops_the_run_though_its_gradient_is_a_number(tmp_path):
    class Loss(
        type(ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path)).objective)
    ):
        def __call__(self, model, batch):
            return {
                name: type(term)(term.sum + math.inf)
                for name, term in super().__call__(model, batch).items()
            }

    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path))
    trainer.objective = Loss()
    with pytest.raises(TrainingError, match="step 1: loss inf"):
        trainer.train(tiny.chat_rows())


def test_a_state_of_before_is_read(tmp_path):
    """Written with Infinity and NaN, and without what is counted since."""
    old = (
        '{"step": 3, "position": 12, "best_loss": Infinity, "evaluations_without_gain": 0, '
        '"last_loss": NaN, '
        '"evaluation": null}'
    )
    run = Run(6, tmp_path)
    run.load_state(json.loads(old))
    assert run.best_loss == math.inf and math.isnan(run.last_loss) and run.applied == 3
    again = Run(6, tmp_path)
    again.load_state({**run.state(), "best_loss": None, "last_loss": None})
    assert again.best_loss == math.inf and math.isnan(again.last_loss) and again.applied == 3


def test_metrics_of_before_are_read_and_lines_are_dated(tmp_path):
    import time

    began = time.time()
    runs.train(tmp_path, max_steps=2, validation_split=0.2)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = read(path)
    assert [line["step"] for line in lines] == [1, 2, 2]
    times = [line["time"] for line in lines]
    assert began - 1 <= times[0] <= times[1] <= times[2] <= time.time() + 1
    path.write_text(
        '{"step": 1, "grad_norm": Infinity, "loss": NaN}\n{"step": 2, "grad_norm": null, "loss": '
        "2.0}\n"
    )
    first, second = read_metrics(path)
    assert (
        first["grad_norm"] == math.inf
        and math.isnan(first["loss"])
        and math.isnan(second["grad_norm"])
    )
