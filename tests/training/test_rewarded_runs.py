"""Runs with the rewards that a configuration names, in their own processes."""

import json
import logging
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

import rollouts
import tiny
from chronicals.cli.app import app
from chronicals.config import ConfigurationError
from chronicals.models import attach_score
from chronicals.saving import save_model
from chronicals.saving.model_files import text_files
from chronicals.training import ChronicalsTrainer, loading
from chronicals.training.errors import TrainingError
from chronicals.training.preparation import readable_again
from chronicals.training.run.callbacks import read_metrics

MINE = """
import pathlib

HERE = pathlib.Path(__file__).parent


def seldom(completions, wanted, **columns):
    return [float("nan") if number == 0 else float(len(text)) for text, number in
            zip(completions, wanted)]


def until_step_two(completions, **columns):
    calls = HERE / "calls"
    done = len(calls.read_text()) if calls.exists() else 0
    if done >= 2 and not (HERE / "mended").exists():
        raise RuntimeError("the judge is away")
    calls.write_text("x" * (done + 1))
    return [float(len(text)) for text in completions]


def failing_alone(completions, wanted, **columns):
    if len(completions) == 4:
        raise RuntimeError("a group by itself")
    return [1.0 if number == wanted[0] else float(row) for row, number in enumerate(wanted)]


def of_another_column(completions, level):
    return level
"""


@pytest.fixture
def mine(tmp_path):
    """The path of a file with rewards."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def train(folder, rewards, resume=False, **changes):
    config = rollouts.config(folder, rewards=rewards, reward_timeout=5.0, **changes)
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config)
    return trainer.train(rollouts.prompts(), resume=resume)


def metrics(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
def test_functions_models_and_built_in_rewards_beside_each_other(tmp_path, mine, caplog):
    model = tiny.llama(seed=1)
    attach_score(model, 1)
    save_model(tmp_path / "judge", model, text_files(model, tiny.tokenizer()), {})
    rewards = [f"{mine}:seldom=0.1", str(tmp_path / "judge"), "length(8, 4)=0.5"]
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, rewards, max_steps=4)
    assert result.steps == 4
    lines = metrics(tmp_path)
    assert {"rewards/seldom", "rewards/judge", "rewards/length"} <= set(lines[0])
    # Each prompt is once among the three of the four steps; the answers to one of them are left out.
    assert sorted(line["answers/left_out"] for line in lines) == pytest.approx([0, 0, 0, 1 / 3])
    assert [line["answers/failed"] for line in lines] == [
        line["answers/left_out"] for line in lines
    ]
    assert "reward seldom: failed for 4 of 12 answers" in caplog.text


@pytest.mark.slow
def test_answers_whose_reward_fails_are_counted_where_they_have_a_number(tmp_path, mine):
    train(tmp_path, [f"{mine}:seldom"], reward_on_error=-1, max_steps=4)
    lines = metrics(tmp_path)
    assert sorted(line["answers/failed"] for line in lines) == pytest.approx([0, 0, 0, 1 / 3])
    assert all(line["answers/left_out"] == 0 for line in lines)


@pytest.mark.slow
def test_a_redrawn_group_that_fails_does_not_end_the_run(tmp_path, mine):
    """It is all that is scored then, and a third of the rollout."""
    train(tmp_path, [f"{mine}:failing_alone"], section={"redraws": 1}, max_steps=1)
    (line,) = metrics(tmp_path)
    assert line["groups/drawn_again"] == 1
    assert line["answers/failed"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_a_run_whose_rewards_fail_ends_with_a_checkpoint_and_goes_on(tmp_path, mine):
    rewards = [f"{mine}:until_step_two"]
    with pytest.raises(TrainingError, match="after step 2: .* more than half.*the judge is away"):
        train(tmp_path, rewards)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name.partition("-")[2]) == 2
    (tmp_path / "mended").touch()
    assert train(tmp_path, rewards, resume=True).steps == 3
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


@dataclass
class OneOfTwo:
    """The first or the second of two ranks, of which the first tells the other results."""

    told: list
    waits: int = 0

    def writer_does(self, work, error):
        if self.waits == len(self.told):
            self.told.append(work())
        self.waits += 1
        return self.told[self.waits - 1]


def test_ranks_wait_for_the_first_equally_often(tmp_path):
    """Rewards that are given are on the first rank; the other must not start its own."""
    told = []
    for rewards in (rollouts.Rewards(), None):
        config = rollouts.config(tmp_path)
        trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config, rewards=rewards)
        trainer.ranks = OneOfTwo(told)
        with trainer._rollouts(readable_again(rollouts.prompts()), None):
            assert trainer.ranks.waits == len(told)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (
            ["mine.py:of_another_column"],
            "of_another_column asks for the column 'level', which rows",
        ),
        (["mine.py:absent"], "cannot be imported: AttributeError"),
        (None, "rewards: none is given, and objective='grpo' learns from nothing else"),
    ],
)
def test_a_reward_that_does_not_fit_is_refused_before_the_first_step(
    tmp_path, mine, monkeypatch, rewards, said
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        train(tmp_path, rewards)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_column_that_rows_lack_is_found_before_a_model_is_loaded(tmp_path, mine, monkeypatch):
    tiny.llama().save_pretrained(tmp_path / "tiny")
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    rows = [{"prompt": "why?", "level": 1}, {"prompt": "and then?"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(*given):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(loading, "load_to_train", load)
    places = ["--model", tmp_path / "tiny", "--output-dir", tmp_path / "run"]
    flags = [*places, "--objective", "grpo", "--rewards", f"{mine}:of_another_column"]
    for data in ("--data", "--validation-data"):
        train = [] if data == "--data" else ["--data", tmp_path / "whole.jsonl"]
        (tmp_path / "whole.jsonl").write_text(json.dumps(rows[0]) + "\n")
        given = map(str, ["train", *flags, *train, data, tmp_path / "prompts.jsonl"])
        with pytest.raises(ConfigurationError, match="row 2: .*of_another_column.*level"):
            CliRunner().invoke(app, [*given], catch_exceptions=False)
