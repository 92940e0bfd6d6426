"""What ends a run or warns of its end: no gradient, not a number, nothing learned, a full disk."""

import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import runs
import tiny
from chronicals.models import Term
from chronicals.objectives import build_objective
from chronicals.objectives.dpo import DPO
from chronicals.training import Callback, CheckpointError, ChronicalsTrainer, TrainingError
from chronicals.training.run import guard
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.guard import DiskUse, check_disk, disk_use
from chronicals.training.run.run_state import Run
from chronicals.training.step import optimizer
from comparison import equal
from preferences import judged_rows, rows

ONE_PAIR = {
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "use_sequence_packing": False,
    "learning_rate": 1e-4,
}
"""A step has one pair."""

HINGE = {"objective": "dpo", "max_steps": 8, **ONE_PAIR}


@pytest.fixture
def reference(tmp_path):
    """Another model than the runs begin with, so that some pairs are beyond the margin from the
    first step on.
    """
    folder = tmp_path / "reference"
    tiny.llama(seed=5).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def hinge(reference, beta=5.0):
    return {"loss": "hinge", "beta": beta, "reference_model": reference}


@pytest.mark.slow
def test_steps_beyond_the_margin_are_steps(reference, tmp_path, caplog):
    """The first step among them: it is the next one whose gradients tell what is trained."""
    with caplog.at_level(logging.INFO):
        result = runs.train(tmp_path, rows(8), dpo=hinge(reference), **HINGE)
    flat = [
        line["step"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["grad_norm"] == 0.0
    ]
    assert 1 in flat and 1 < len(flat) < 8, "the data no longer hold both kinds of step"
    assert result.steps == 8 and result.model_dir.exists()
    assert result.coverage.moved == result.coverage.asked
    assert "step 1 has no gradient: the loss of every pair is at its lowest value, 0" in caplog.text
    assert f"{len(flat)} of 8 steps had no gradient" in caplog.text


def test_a_run_of_a_few_flat_steps_is_finished_and_says_so(reference, tmp_path, caplog):
    """Of its one pair the margin is 44."""
    with caplog.at_level(logging.WARNING):
        runs.train(tmp_path, rows(1), dpo=hinge(reference, 50.0), **{**HINGE, "max_steps": 3})
    assert (tmp_path / "run" / "model").exists()
    assert (
        "3 of 3 steps had no gradient, as the loss was flat there; no step had one" in caplog.text
    )


def test_a_run_that_is_flat_from_the_beginning_cannot_learn(reference, tmp_path, set_constants):
    set_constants(guard, MOST_FLAT=4)
    with pytest.raises(
        TrainingError,
        match=r"none of the first 4 steps had a gradient.*at its lowest value.*loss 0\.0",
    ):
        runs.train(tmp_path, rows(1), dpo=hinge(reference, 50.0), **HINGE)
    assert not (tmp_path / "run" / "model").exists()


class HingeTimes(DPO):
    """The hinge with another factor on its terms."""

    factor = 0.0

    def terms(self, pairs):
        return {
            name: Term(term.sum * self.factor, term.coefficient, term.per)
            for name, term in super().terms(pairs).items()
        }


class DetachedHinge(DPO):
    def terms(self, pairs):
        return {
            name: Term(term.sum.detach(), term.coefficient, term.per)
            for name, term in super().terms(pairs).items()
        }


def faulty(tmp_path, objective, reference, model=None, **changes):
    """A trainer of a hinge that has a fault."""
    changes = {**HINGE, "dpo": hinge(reference), **changes}
    trainer = ChronicalsTrainer(
        model or tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, **changes)
    )
    trainer.objective = objective(trainer.objective.settings)
    return trainer


def test_a_detached_loss_ends_the_run(reference, tmp_path):
    with pytest.raises(
        TrainingError, match="the loss does not depend on any weight that is trained"
    ):
        faulty(tmp_path, DetachedHinge, reference).train(rows(8))


def test_a_loss_times_zero_ends_the_run(reference, tmp_path, set_constants):
    """Its value is that of a hinge beyond the margin, so only the number of such steps tells."""
    set_constants(guard, MOST_FLAT=4)
    with pytest.raises(TrainingError, match="none of the first 4 steps had a gradient"):
        faulty(tmp_path, HingeTimes, reference).train(rows(8))


def test_gradients_that_do_not_arrive_end_a_hinge_run(reference, tmp_path):
    """Some pairs are within the margin, so that the loss is not what the hinge has where it is
    flat.
    """
    model = tiny.llama()
    for weight in model.parameters():
        weight.register_hook(torch.zeros_like)
    with pytest.raises(TrainingError, match="Every gradient is zero"):
        faulty(tmp_path, DPO, reference, model, gradient_accumulation_steps=4).train(rows(8))


def test_adapters_that_the_model_does_not_use_end_a_hinge_run(reference, tmp_path):
    """Also where all pairs are beyond the margin: no gradient of any adapter exists."""
    model = tiny.llama()
    trainer = faulty(tmp_path, DPO, reference, model, use_lora=True, lora_rank=4)
    for layer in model.model.layers:
        layer.register_full_backward_hook(lambda *_: None)  # keeps the layers from running fused
        layer.register_forward_hook(lambda layer, given, output: given[0].detach().requires_grad_())
    with pytest.raises(TrainingError, match="(?i)every gradient is zero|does not depend"):
        trainer.train(rows(1))


@pytest.mark.slow
def test_flat_steps_are_counted_on_after_a_resume(reference, tmp_path, set_constants):
    set_constants(guard, MOST_FLAT=5)
    runs.train(tmp_path, rows(1), dpo=hinge(reference, 50.0), **{**HINGE, "max_steps": 3})
    with pytest.raises(TrainingError, match="none of the first 5 steps"):
        runs.train(tmp_path, rows(1), dpo=hinge(reference, 50.0), resume=True, **HINGE)


def why(objective, section, values):
    """What the objective says of a step with these values and no gradient."""
    return build_objective(runs.config(Path("."), objective=objective, **section)).why_no_gradient(
        values
    )


ENTROPY = -0.1 * math.log(0.1) - 0.9 * math.log(0.9)

FLAT = {
    "hinge": ("dpo", {"dpo": {"loss": "hinge"}}, 0.0),
    "sigmoid": ("dpo", {}, 1e-20),
    "smoothed": ("dpo", {"dpo": {"label_smoothing": 0.1}}, ENTROPY),
    "robust": ("dpo", {"dpo": {"loss": "robust"}}, 0.0),
    "by token": ("dpo", {"dpo": {"loss": "sigmoid_norm"}}, 0.0),
    "ipo": ("ipo", {}, 0.0),
    "simpo": ("simpo", {"simpo": {"gamma": 0.5}}, 0.0),
    "cpo without cross-entropy": ("cpo", {"cpo": {"alpha": 0.0}}, 0.0),
    "reward": ("reward", {}, 0.0),
}


@pytest.mark.parametrize("name", FLAT)
def test_where_a_loss_of_pairs_is_flat(name):
    """At its lowest value, and nowhere above."""
    objective, section, lowest = FLAT[name]
    assert why(objective, section, {"loss": lowest})
    assert why(objective, section, {"loss": lowest + 0.01}) is None


NOWHERE = {
    "sft": ("sft", {}),
    "pretraining": ("pretraining", {}),
    "orpo": ("orpo", {}),
    "cpo": ("cpo", {}),
    "robust with smoothing": ("dpo", {"dpo": {"loss": "robust", "label_smoothing": 0.1}}),
    "distill": ("distill", {"distill": {"teacher": "teacher"}}),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_a_loss_that_is_flat_nowhere_explains_no_zero(name):
    objective, section = NOWHERE[name]
    assert why(objective, section, {"loss": 0.0, "cross_entropy": 0.0}) is None


@pytest.mark.parametrize(
    "values, flat",
    [
        ({"rewards/chosen": 40.0, "rewards/rejected": -40.0, "kl": 0.0}, True),
        ({"rewards/rejected": -40.0, "kl": 0.0}, True),
        ({"rewards/rejected": 0.0, "kl": 0.0}, False),
        ({"rewards/chosen": 40.0, "rewards/rejected": -1.0, "kl": 0.0}, False),
        ({"rewards/chosen": 20.0, "kl": 150.0}, False),
    ],
    ids=["both kinds", "bad answers alone", "as it begins", "one kind alone", "near z"],
)
def test_where_the_loss_of_judged_answers_is_flat(values, flat):
    assert (why("kto", {}, {"loss": 0.5, **values}) is not None) == flat


GOOD = {"advantage": 0.8, "loss": -0.1}


@pytest.mark.parametrize(
    "section, values, flat",
    [
        ({}, {"advantage": 0.0}, True),
        ({}, GOOD, False),
        ({}, {**GOOD, "clip/low": 0.3, "clip/high": 0.2}, True),
        ({"entropy": 0.1}, {**GOOD, "clip/low": 0.3}, False),
        ({"beta": 0.1}, {**GOOD, "clip/low": 0.3}, False),
        ({"importance": "token_mask"}, {**GOOD, "importance/cut": 1.0}, True),
        ({"importance": "token_truncate"}, {**GOOD, "importance/cut": 1.0}, False),
    ],
    ids=lambda given: " ".join(map(str, given)) if isinstance(given, dict) else str(given),
)
def test_where_the_loss_of_drawn_answers_is_flat(section, values, flat):
    assert (why("grpo", {"grpo": section}, values) is not None) == flat


def test_answers_of_which_none_is_good_are_trained(tmp_path):
    bad = [{**row, "label": False} for row in judged_rows(8)]
    result = runs.train(tmp_path, bad, objective="kto", max_steps=2, gate={"one_label": 1.0})
    assert result.coverage.with_gradient == result.coverage.asked


class Overflows(Callback):
    """A weight of the model becomes infinite after a step."""

    def __init__(self, model, step):
        self.model = model
        self.step = step

    def step_done(self, metrics):
        if metrics.step == self.step:
            with torch.no_grad():
                self.model.model.layers[1].mlp.up_proj.weight[3, 5] = math.inf


def test_weights_that_are_not_finite_take_no_checkpoints_place(tmp_path):
    model = tiny.llama()
    with pytest.raises(
        TrainingError,
        match=r"step 4: it left weights that are not finite.*not saved.*learning_rate",
    ):
        runs.train(
            tmp_path,
            model=model,
            callbacks=[Overflows(model, 4)],
            max_steps=4,
            save_steps=2,
            save_total_limit=1,
        )
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "step-00000002"
    ]
    assert not (tmp_path / "run" / "model").exists()


KINDS = {
    "full": {},
    "bf16": {"mixed_precision": "bf16"},
    "states in bf16": {"optimizer_state_dtype": "bf16"},
    "8-bit states": {"use_8bit_optimizer": True},
    "lora": {"use_lora": True, "lora_rank": 8},
    "lora and the embedding": {
        "use_lora": True,
        "lora_rank": 8,
        "lora_modules_to_save": ["embed_tokens"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_takes_what_was_said(kind, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "chronicals.training.trainer.check_disk", lambda use, config: said.append(use)
    )
    model = tiny.llama(hidden_size=128, intermediate_size=256)
    runs.train(tmp_path, model=model, max_steps=1, trackers=[], **KINDS[kind])
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    weights = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    states = sum(path.stat().st_size for path in folder.glob("optimizer*.safetensors"))
    (use,) = said
    assert use.model == pytest.approx(weights, rel=0.05)
    assert use.checkpoint == pytest.approx(weights + states, rel=0.05)


def with_free(monkeypatch, free):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1 << 40, 0, free)
    )


def test_a_first_checkpoint_that_does_not_fit_is_an_error_before_the_first_step(
    tmp_path, monkeypatch
):
    with_free(monkeypatch, 1 << 20)
    with pytest.raises(
        CheckpointError,
        match=r"output_dir='.*run': its disk is full.*takes 1\.15 MiB, and 1\.00 MiB are free",
    ):
        runs.train(tmp_path)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_checkpoints_that_may_not_all_fit_are_warned_of(tmp_path, monkeypatch, caplog):
    with_free(monkeypatch, 30 << 30)
    config = runs.config(tmp_path, save_total_limit=3)
    check_disk(DiskUse(model=1 << 30, checkpoint=7 << 30, at_a_time=4), config)
    assert not caplog.text
    check_disk(DiskUse(model=3 << 30, checkpoint=7 << 30, at_a_time=4), config)
    assert (
        "4 checkpoints at a time and the model take 31.00 GiB, and its disk has 30.00 GiB free"
        in caplog.text
    )
    assert "lower save_total_limit=3" in caplog.text


@pytest.mark.parametrize(
    "changes, done, at_a_time",
    [
        ({"save_steps": None}, 0, 1),
        ({"save_steps": 500, "max_steps": 600}, 0, 2),
        ({"save_steps": 100, "max_steps": 600}, 0, 3),
        ({"save_steps": 100, "max_steps": 600, "save_total_limit": 1}, 0, 2),
        ({"save_steps": 100, "max_steps": 600}, 550, 1),
        ({"save_steps": None, "max_steps": 600, "eval_steps": 10}, 0, 3),
    ],
)
def test_how_many_are_there_at_a_time(changes, done, at_a_time, tmp_path):
    config = runs.config(tmp_path, **changes)
    run = Run(config.max_steps, config.output_dir, step=done)
    assert (
        disk_use(tiny.llama(), config, run, keeps_best="eval_steps" in changes).at_a_time
        == at_a_time
    )


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


def overflowing(folder, set_constants, **changes):
    """A run in fp16 with a loss scale that is far too high; which of its steps were skipped."""
    set_constants(optimizer, START_SCALE=2.0**60)
    skipped = []
    runs.train(folder, mixed_precision="fp16", callbacks=[Overflow(skipped)], **changes)
    return skipped


@pytest.mark.slow
def test_a_run_of_which_no_step_was_applied_is_not_finished(tmp_path, set_constants):
    model = tiny.llama()
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(
        TrainingError,
        match=r"none of the 6 steps was applied.*fallen to 1.80144e\+16.*mixed_precision='bf16'",
    ):
        overflowing(tmp_path, set_constants, model=model)
    assert all(equal(a, b) for a, b in zip(before, model.parameters()))
    assert not (tmp_path / "run" / "model").exists()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["grad_norm"] for line in lines] == [None] * 6
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text(), parse_constant=pytest.fail)["best_loss"] is None


@pytest.mark.slow
def test_steps_that_were_skipped_count_on_after_a_resume(tmp_path, set_constants):
    """The scale goes on falling from where it was; and a run that then trains is audited and
    finishes.
    """
    for steps in (6, 12):
        scale = re.escape(f"{2.0 ** (60 - steps):g}")
        with pytest.raises(
            TrainingError, match=f"none of the {steps} steps was applied.*fallen to {scale}"
        ):
            overflowing(tmp_path, set_constants, resume=steps > 6, max_steps=steps)
    with pytest.raises(TrainingError, match="step 21: gradient norm"):
        overflowing(tmp_path, set_constants, resume=True, max_steps=40)


@pytest.mark.slow
def test_a_step_applied_after_a_resume_is_audited(tmp_path, monkeypatch, set_constants):
    set_constants(optimizer, START_SCALE=2.0**60)
    with pytest.raises(TrainingError):
        runs.train(tmp_path, mixed_precision="fp16", max_steps=2)
    state = next((tmp_path / "run" / "checkpoints").glob("*/state.json"))
    monkeypatch.setattr(
        optimizer.Precision, "load_state", lambda self, state: self.scale.fill_(2.0**16)
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
