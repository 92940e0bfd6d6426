"""An objective of one's own, in one file: registered here, it trains from Python, a recipe and
the command line.
"""

import json
import logging
import re

import pytest
import torch
import yaml
from pydantic import Field
from typer.testing import CliRunner

import runs
import tiny
from chronicals.cli import wording
from chronicals.cli.app import app
from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.objectives import OBJECTIVES, Objective, Term, build_objective, register, settings
from chronicals.training import Callback, ChronicalsTrainer
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.evaluation import Evaluation

SHARPNESS = "toy/sharpness"


@pytest.fixture(autouse=True)
def toy():
    """Cross-entropy of the targets to a power, and how sure the model is."""

    @register("toy")
    class Toy(Objective):
        full_learning_rate = 1e-3
        adapter_learning_rate = 5e-3

        @settings
        class Settings:
            power: float = Field(default=1.0, gt=0, description="Exponent of each target's loss")

        def __call__(self, model, batch):
            states, auxiliary = model(batch)
            logits = states if model.head is None else model.head.logits(states)
            trained = batch.targets >= 0
            chances = logits[trained].float().log_softmax(-1)
            losses = -(chances.gather(-1, batch.targets[trained][:, None]) ** 1)
            sharpness = chances.exp().amax(-1).sum()
            return {
                "toy": Term((losses**self.settings.power).sum()),
                SHARPNESS: Term(sharpness, 0.0),
                **auxiliary,
            }

    yield Toy
    del OBJECTIVES["toy"]


@pytest.mark.slow
@pytest.mark.draws
def test_its_metrics_appear_everywhere(tmp_path, caplog):
    """Averaged over the targets of a whole step, however it is divided into batches."""
    pytest.importorskip("tensorboard")
    caplog.set_level(logging.INFO)
    seen = []
    lines = {}

    class Look(Callback):
        def step_done(self, metrics):
            seen.append(metrics.others)

        def evaluated(self, step, evaluation):
            seen.append(evaluation.others)

    for batch, accumulation in ((4, 1), (1, 4)):
        folder = tmp_path / str(batch)
        sizes = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
        changes = {
            "objective": "toy",
            "toy": {"power": 1.5},
            "validation_split": 0.2,
            "max_steps": 3,
            **sizes,
        }
        result = runs.train(folder, callbacks=[Look()], trackers=["tensorboard"], **changes)
        lines[batch] = read_metrics(folder / "run" / "metrics.jsonl")
    *steps, evaluation = lines[4]
    assert [line[SHARPNESS] for line in lines[1][:3]] == pytest.approx(
        [line[SHARPNESS] for line in steps], rel=1e-5
    )
    assert (
        all(0 < line[SHARPNESS] <= 1 for line in steps) and 0 < evaluation[f"eval_{SHARPNESS}"] <= 1
    )
    assert "eval_perplexity" not in evaluation and "toy" not in steps[0]
    assert seen[:4] == [
        *({SHARPNESS: line[SHARPNESS]} for line in steps),
        {SHARPNESS: evaluation[f"eval_{SHARPNESS}"]},
    ]
    assert result.evaluation == Evaluation.from_dict(
        json.loads(json.dumps(result.evaluation.to_dict()))
    )
    told = [record.getMessage() for record in caplog.records]
    assert any(f"{SHARPNESS} " in line and "step 1/3" in line for line in told)
    assert any(f"{SHARPNESS} " in line and "held-out after step" in line for line in told)
    assert f"<!-- {SHARPNESS} -->" in svg_of(result.report)
    assert {f"train/{SHARPNESS}", f"eval/{SHARPNESS}"} <= tags_of(
        tmp_path / "4" / "run" / "tensorboard"
    )


def svg_of(report):
    import base64
    import re

    return base64.b64decode(re.search(r"base64,([^\"]+)", report.read_text())[1]).decode()


def tags_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_resumed_it_goes_on(tmp_path):
    changes = {"objective": "toy", "validation_split": 0.2, "save_steps": 2, "eval_steps": 2}
    runs.train(tmp_path / "whole", max_steps=4, **changes)
    runs.train(tmp_path / "halves", max_steps=2, lr_scheduler="constant", **changes)
    result = runs.train(tmp_path / "halves", max_steps=4, resume=True, **changes)
    assert result.evaluation.others.keys() == {SHARPNESS}


def test_settings_change_what_is_minimised(tmp_path):
    for power in (1.0, 2.0):
        runs.train(tmp_path / str(power), max_steps=1, objective="toy", toy={"power": power})
    one, two = (runs.trajectory(tmp_path / power)[0][1] for power in ("1.0", "2.0"))
    assert two > 1.5 * one


@pytest.mark.parametrize(
    ("changes", "rate"),
    [({}, 1e-3), ({"use_lora": True, "lora_rank": 4}, 5e-3)],
    ids=["full", "lora"],
)
def test_its_own_learning_rate(changes, rate, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    fields = {
        **runs.config(tmp_path, max_steps=1, **changes).to_dict(),
        "objective": "toy",
        "warmup_steps": 0,
    }
    del fields["learning_rate"]
    kept = {
        name: value for name, value in fields.items() if value != getattr(ChronicalsConfig(), name)
    }
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), ChronicalsConfig(**kept))
    trainer.train(tiny.chat_rows())
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["learning_rate"] == rate
    assert f"learning rate: {rate:g}, the default of objective toy" in caplog.text


# --- the command line
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def fields(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    usual = runs.config(tmp_path, max_steps=1).to_dict()
    names = (
        "batch_size",
        "max_seq_length",
        "mixed_precision",
        "report_samples",
        "output_dir",
        "cache_dir",
        "max_steps",
    )
    given = {
        "model": str(tmp_path / "model"),
        "data": str(tmp_path / "rows.jsonl"),
        "objective": "toy",
    }
    return {**{name: usual[name] for name in names}, **given}


@pytest.mark.slow
def test_a_recipe_and_flags_train_it(tmp_path, fields, record_calls, toy):
    """The section of a recipe, a setting overridden by a flag; ``--resume`` keeps both."""
    built = record_calls(toy, "__init__")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**fields, "toy": {"power": 2}}))
    assert (
        CliRunner()
        .invoke(app, ["train", str(tmp_path / "recipe.yaml")], catch_exceptions=False)
        .exit_code
        == 0
    )
    assert {objective.settings.power for objective, *_ in built} == {2.0}
    built.clear()
    again = [
        "train",
        "--resume",
        "--output-dir",
        str(fields["output_dir"]),
        "--max-steps",
        "2",
        "--toy.power",
        "3e0",
    ]
    assert CliRunner().invoke(app, again, catch_exceptions=False).exit_code == 0
    assert {objective.settings.power for objective, *_ in built} == {3.0}
    assert yaml.safe_load((tmp_path / "run" / "resume.yaml").read_text())["toy"] == {"power": 2}


WRONG = [
    (
        {"toy": {"power": -1}},
        "--toy.power -1: Input should be greater than 0",
        "toy: {power: -1}: Input should be greater",
    ),
    (
        {"toy": {"powr": 1}},
        "--toy.powr 1: no such setting; did you mean 'power'?",
        "toy: {powr: 1}: no such setting",
    ),
    (
        {"tpy": {"power": 1}},
        "tpy: no such field; did you mean 'toy'?",
        "tpy: no such field; did you mean 'toy'?",
    ),
]


@pytest.mark.parametrize(("section", "as_flag", "in_recipe"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    section, as_flag, in_recipe, tmp_path, fields
):
    ((name, given),) = section.items()
    ((setting, value),) = given.items()
    whole = {**fields, "model": "no/such/model"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**whole, **section}))
    flags = [
        text
        for name, value in whole.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    for arguments, said in (
        (["train", *flags, f"--{name}.{setting}={value}"], as_flag),
        (["train", str(tmp_path / "recipe.yaml")], in_recipe),
        (["train", str(tmp_path / "recipe.yaml"), f"--{name}.{setting}", str(value)], as_flag),
    ):
        with pytest.raises(ConfigurationError) as error:
            CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert said in wording.in_users_form(str(error.value))


def test_a_setting_is_no_flag_of_the_same_name(fields):
    flags = [
        text
        for name, value in fields.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    with pytest.raises(ConfigurationError) as error:
        CliRunner().invoke(
            app, ["train", *flags, "--objective", "dpo", "--dpo.quux", "1"], catch_exceptions=False
        )
    assert "--dpo.quux 1: no such setting; there are 'reference', " in (
        said := wording.in_users_form(str(error.value))
    )
    assert "'trust_remote_code', 'beta'" in said


def test_what_is_wrong_is_said_in_python():
    def refused(**given):
        with pytest.raises(ConfigurationError) as error:
            build_objective(ChronicalsConfig(**given))
        return str(error.value)

    assert (
        refused(objective="toy", toy={"power": 0})
        == "toy={'power': 0}: Input should be greater than 0"
    )
    assert "toy={'power': 2}: settings of another objective than objective='sft'" in refused(
        toy={"power": 2}
    )
    assert refused(objective="tox") == "objective='tox': no such objective; did you mean 'toy'?"
    assert re.search(r"there are .*sft.*, toy", refused(objective="quux"))
    assert (
        refused(objective="sft", sft={"beta": 1}) == "sft={'beta': 1}: no such setting; it has none"
    )
    assert "did you mean 'gate'" in refused(gat={"empty": 0.5})


def test_a_flag_without_a_value():
    result = CliRunner().invoke(app, ["train", "--toy.power", "--use-lora"])
    assert result.exit_code == 2 and "'--toy.power' requires an argument" in result.output


# --- the configuration
# ------------------------------------------------------------------------------------------------


def test_sections_are_kept(tmp_path):
    config = ChronicalsConfig(objective="toy", toy={"power": 2})
    config.to_yaml(tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == {
        "objective": "toy",
        "toy": {"power": 2},
    }
    assert (
        ChronicalsConfig.from_yaml(tmp_path / "c.yaml")
        == config
        == ChronicalsConfig(**config.to_dict())
    )
    assert config.replace(seed=3).sections == {"toy": {"power": 2}}
    assert ChronicalsConfig.from_yaml(tmp_path / "c.yaml", toy={"other": 3}).sections == {
        "toy": {"power": 2, "other": 3}
    }
    config.toy = {"power": 4}
    assert build_objective(config).settings.power == 4
    recipe = Recipe(model="m", data="d", objective="toy", toy={"power": 5})
    assert recipe.config().sections == {"toy": {"power": 5}}


def test_a_name_of_a_steps_own_metrics_is_refused(tmp_path, toy):
    class Taken(toy):
        def __call__(self, model, batch):
            return {
                **super().__call__(model, batch),
                "fill": Term(torch.zeros((), device=batch.input_ids.device), 0.0),
            }

    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, max_steps=1))
    trainer.objective = Taken()
    with pytest.raises(ValueError, match="calls something fill"):
        trainer.train(tiny.chat_rows())
