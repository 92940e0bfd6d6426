"""A gradient of zero: where it is right, and where it is a fault."""

import logging
import math
from pathlib import Path

import pytest
import torch

import runs
import tiny
from chronicals.models import Term
from chronicals.objectives import build_objective
from chronicals.objectives.dpo import DPO
from chronicals.training import Callback, ChronicalsTrainer, TrainingError
from chronicals.training.run import guard
from chronicals.training.run.callbacks import read_metrics
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
