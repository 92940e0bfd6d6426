"""``chronicals tune``: the command over scripted runs, the page's own code, and real runs."""

import functools
import json
import math
import random
import re
from pathlib import Path

import pytest
import yaml
from scripted import BUDGET, PROGRAM
from typer.testing import CliRunner

import runs
import tiny
from chronicals.cli.app import app, main
from chronicals.config import Recipe
from chronicals.tuning import Tuner
from chronicals.tuning.run_process import MetricsTail
from chronicals.tuning.scores import held_out_score
from chronicals.tuning.search import Search, by_score
from chronicals.tuning.settings import StudySettings, divided
from chronicals.tuning.space import SearchSpace
from chronicals.tuning.trial import State, Trial

pytest.importorskip("optuna")

PAGE = Path(__file__).parent.parent.parent / "docs" / "tuning.md"

RECIPE = """\
model: m
data: d
validation_split: 0.1
output_dir: out
tune:
  learning_rate: [1e-5, 1e-1, log]
  weight_decay: [0.0, 0.3, linear]
  trials: 10
  repeats: 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with a recipe, whose runs are scripted."""
    monkeypatch.chdir(tmp_path)
    scripted = functools.partial(Tuner, program=PROGRAM, budget=lambda recipe: BUDGET)
    monkeypatch.setattr("chronicals.tuning.Tuner", scripted)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments])


@pytest.mark.slow
def test_a_dimension_as_a_flag_leaves_the_settings_of_the_recipe(folder):
    (folder / "recipe.yaml").write_text(
        RECIPE.replace("10", "2").replace("repeats: 1", "repeats: 0")
    )
    done = invoke("recipe.yaml", "--tune", "weight_decay=[0.0, 0.3, linear]")
    assert done.exit_code == 0, done.output
    about = json.loads((folder / "out-study" / "study.json").read_text())
    assert about["space"] == {"weight_decay": [0.0, 0.3, "linear"]}
    assert (about["settings"]["trials"], about["settings"]["repeats"]) == (2, 0)


@pytest.mark.slow
def test_a_study_is_shown_written_and_exported(folder):
    done = invoke("recipe.yaml", "--apply", "recipe.yaml", "--export", "study.log")
    assert done.exit_code == 0, done.output
    assert "trial 0: learning_rate 0.0002, weight_decay 0" in done.output
    assert "0 (yours)" in done.output and "±" in done.output
    assert "is better than your own settings" in done.output
    assert "10 trials: optuna-dashboard study.log" in done.output
    assert (folder / "out-study" / "report.html").exists() and (folder / "study.log").exists()
    written = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert 3e-4 < written["learning_rate"] < 4e-3
    assert written["tune"] == yaml.safe_load(RECIPE)["tune"]
    again = invoke("recipe.yaml", "--learning-rate", "2e-4", "--weight-decay", "0.0")
    assert "trial 1:" not in again.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tune", "learning_rat=[1, 2]"], "did you mean 'learning_rate'"),
        (["--tune", "learning_rate=[1e-3, 1e-5, log]"], "upside down"),
        (["--validation-split", "0"], "nothing is held out"),
        (["--metric", "tokens_per_second"], "changes what is trained"),
    ],
)
def test_a_mistake_is_told_before_a_trial(folder, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["tune", "recipe.yaml", *arguments])
    assert ended.value.code == 1
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (folder / "out-study").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_a_study_that_goes_on(folder, monkeypatch, capsys):
    monkeypatch.setenv("SCRIPTED_SECONDS", "0.5")
    looks = []

    def interrupt(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("chronicals.cli.tune.time.sleep", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["tune", "recipe.yaml"])
    assert ended.value.code == 130
    assert "the same command goes on with the study" in capsys.readouterr().err


def test_train_takes_a_recipe_with_a_study_in_it(folder):
    recipe = Recipe.given(file=folder / "recipe.yaml")
    assert recipe.tune["learning_rate"] == ["1e-5", "1e-1", "log"]
    assert "tune" not in recipe.config().to_dict() and recipe.config().sections == {}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_example_of_the_page_runs(folder, capsys):
    (example,) = blocks("python")
    exec(compile(example, str(PAGE), "exec"), {})
    said = capsys.readouterr().out
    assert "status running" in said and "trial trial 3" in said and "status finished" in said


def test_the_recipe_of_the_page_is_a_study():
    (text,) = blocks("yaml")
    recipe = Recipe(**yaml.safe_load(text))
    settings, dimensions = divided(recipe.tune)
    assert settings == StudySettings()
    assert [*SearchSpace.of(dimensions, recipe, "loss").dimensions] == [
        "learning_rate",
        "lora_rank",
    ]


def test_the_page_names_all_settings():
    text = PAGE.read_text()
    for name in StudySettings.__dataclass_fields__:
        assert f"| `{name}` |" in text, name


def held_out_loss(folder, rate, rows):
    """Held-out loss of a real run of a tiny model."""
    runs.train(
        folder,
        rows,
        eval_rows=tiny.chat_rows(90)[60:],
        learning_rate=rate,
        max_steps=12,
        keep="last",
        save_steps=None,
    )
    return held_out_score(MetricsTail(folder / "run" / "metrics.jsonl").look()[-1], "loss")


@pytest.mark.long
def test_the_best_rate_of_a_real_task_is_that_of_a_grid(tmp_path):
    """Within a factor of two, in 15 trials."""
    rows = tiny.chat_rows(60)
    grid = {10 ** (-4 + n / 3): 0.0 for n in range(10)}  # 1e-4 to 1e-1
    for number, rate in enumerate(grid):
        grid[rate] = held_out_loss(tmp_path / f"grid-{number}", rate, rows)
    best = min(grid, key=lambda rate: grid[rate])
    recipe = Recipe(model="m", data="d", learning_rate=2e-4)
    space = SearchSpace.of({"learning_rate": [1e-4, 1e-1, "log"]}, recipe, "loss")
    settings = StudySettings(metric="loss")
    search = Search(space, settings, 42, 1)
    trials = []
    for number in range(15):
        params = search.next_params(trials)
        loss = held_out_loss(tmp_path / f"trial-{number}", params["learning_rate"], rows)
        trials.append(Trial(number, params, 42, None, State.COMPLETE, {1: loss}, loss))
    found = by_score(settings, trials)[0]
    ratio = math.log2(found.params["learning_rate"] / best)
    assert abs(ratio) <= 1 or found.value < grid[best], (found, grid)


@pytest.mark.slow
def test_shuffled_labels_score_worse(tmp_path):
    """What is compared is learned from the rows that were given."""
    rows = tiny.chat_rows(60)
    answers = [row["messages"][1] for row in rows]
    random.Random(0).shuffle(answers)
    shuffled = [{"messages": [row["messages"][0], answer]} for row, answer in zip(rows, answers)]
    words = "zyx "  # other answers than the held-out rows have
    wrong = [
        {"messages": [row["messages"][0], {"role": "assistant", "content": words * (n % 9 + 1)}]}
        for n, row in enumerate(rows)
    ]
    true = held_out_loss(tmp_path / "true", 3e-3, rows)
    assert true < held_out_loss(tmp_path / "shuffled", 3e-3, shuffled)
    assert true + 0.5 < held_out_loss(tmp_path / "wrong", 3e-3, wrong)


@pytest.mark.long
def test_real_runs_are_tuned(tmp_path, monkeypatch):
    """Two trials of a tiny model by the command line, in processes of their own."""
    import json

    monkeypatch.chdir(tmp_path)
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(80))
    (tmp_path / "chats.jsonl").write_text(rows)
    fields = {
        "model": "model",
        "data": "chats.jsonl",
        "validation_split": 0.2,
        "max_seq_length": 128,
        "max_steps": 6,
        "mixed_precision": "fp32",
        "use_torch_compile": False,
        "cache_dir": str(tmp_path / "tokens"),
        "output_dir": "out",
        "tune": {"learning_rate": [1e-3, 1e-2, "log"], "trials": 2, "repeats": 0},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    done = invoke("recipe.yaml")
    assert done.exit_code == 0, done.output
    trials = Tuner(Recipe.given(file=tmp_path / "recipe.yaml")).study.trials()
    assert [trial.state for trial in trials] == [State.COMPLETE] * 2
    assert trials[1].value < trials[0].value  # ten times the rate, in so few steps
