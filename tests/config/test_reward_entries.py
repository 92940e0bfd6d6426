"""Entries of ``rewards`` as recipes, flags and Python have them."""

import functools

import pytest
import yaml

import reward_examples
from chronicals.cli.options import with_recipe_flags
from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.config.reward_entries import RewardEntry, lasting_reward, reward_entry
from chronicals.objectives.registry import build_objective


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        ("mine:exact", RewardEntry("mine:exact")),
        ("mine.sub:Judge.score=0.5", RewardEntry("mine.sub:Judge.score", weight=0.5)),
        ("a/b=c/mine.py:f = -1e-1", RewardEntry("a/b=c/mine.py:f", weight=-0.1)),
        ("exact", RewardEntry("exact")),
        ("length(512, 128)=2", RewardEntry("length", "512, 128", 2.0)),
        ("regex(a=b)", RewardEntry("regex", "a=b")),
        (r"regex(x{1,2}\)=(y))=0.2", RewardEntry("regex", r"x{1,2}\)=(y)", 0.2)),
        ("org/name=0.3", RewardEntry("org/name", weight=0.3)),
        (reward_examples.letters, RewardEntry("reward_examples:letters", weight=1.0)),
        ((reward_examples.judge, 3), RewardEntry("reward_examples:Judge", weight=3.0)),
    ],
)
def test_an_entry_has_a_place_and_a_weight(given, entry):
    found = reward_entry(given)
    assert (found.place, found.argument, found.weight) == (
        entry.place,
        entry.argument,
        entry.weight,
    )


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (["mine:f=high"], "the weight of 'mine:f=high' is no finite number"),
        (["mine:f=nan"], "is no finite number; give one as mine:exact=0.5"),
        (
            ["pack.mine.exact=2"],
            "names no function; a colon stands before its name: pack.mine:exact",
        ),
        (["mine:"], "'mine:' lacks a part; give module:function"),
        (["exact", "exact=0.5"], "'exact' is named twice; keep one"),
        ([3], "3 is no reward; give the path of a function as module:function"),
    ],
)
def test_what_is_no_reward_is_refused(rewards, said):
    with pytest.raises(ConfigurationError, match=r"^rewards=\[.*") as error:
        ChronicalsConfig(rewards=rewards)
    assert said in str(error.value)


def test_flags_may_be_repeated_or_have_commas():
    command = with_recipe_flags(lambda **flags: Recipe(model="m", data="d", **flags).rewards)
    given = ["mine:exact", "mine:short=0.2,regex(a{1,2}),length(5,1)=-1"]
    assert command(rewards=given) == [
        "mine:exact",
        "mine:short=0.2",
        "regex(a{1,2})",
        "length(5,1)=-1",
    ]


def test_a_single_function_is_a_list_of_it():
    assert ChronicalsConfig(rewards=reward_examples.letters).rewards == [reward_examples.letters]


def test_a_recipe_has_functions_by_their_paths(tmp_path):
    partial = functools.partial(reward_examples.letters)
    config = ChronicalsConfig(rewards=[(reward_examples.letters, 0.5), partial, "exact"])
    config.to_yaml(tmp_path / "recipe.yaml")
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["rewards"] == [
        "reward_examples:letters=0.5",
        "functools:partial",
        "exact",
    ]


def test_files_and_folders_of_a_run_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "judge").mkdir()
    written = [lasting_reward(given) for given in ("mine.py:f=2", "judge", "mine:f", "regex(a)")]
    assert written == [f"{tmp_path}/mine.py:f=2.0", f"{tmp_path}/judge", "mine:f", "regex(a)"]
    Recipe(model="m", data="d", rewards=["mine.py:f"]).write_to(tmp_path / "run")
    assert Recipe.read_yaml(tmp_path / "run" / "resume.yaml")["rewards"] == [
        f"{tmp_path}/mine.py:f"
    ]


@pytest.mark.parametrize(
    ("given", "value"), [("drop", "drop"), ("0", 0.0), (-1, -1.0), ("2.5", 2.5)]
)
def test_an_answer_whose_reward_fails_is_dropped_or_has_a_number(given, value):
    assert ChronicalsConfig(reward_on_error=given).reward_on_error == value


@pytest.mark.parametrize("given", ["skip", "nan", True, None])
def test_nothing_else(given):
    with pytest.raises(ConfigurationError, match="takes drop, or the reward of such an answer"):
        ChronicalsConfig(reward_on_error=given)


def test_an_objective_that_generates_no_answers_has_no_rewards():
    with pytest.raises(ConfigurationError, match=r"^rewards=\['exact=2'\]: objective='sft' trains"):
        build_objective(ChronicalsConfig(rewards=["exact=2"]))
