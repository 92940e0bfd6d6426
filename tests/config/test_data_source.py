"""What a recipe may say about its data, and how it is told what is wrong with it."""

import random
from pathlib import Path

import pytest

from chronicals.config import ConfigurationError, DataSource, Recipe

OTHER = DataSource(
    "b.jsonl", subset="main", split="test", weight=0.5, columns={"text": "body"}, name="essays"
)


def data(value):
    return Recipe(model="m", data=value).data


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a.jsonl", "a.jsonl"),
        (Path("a.jsonl"), "a.jsonl"),
        (["a.jsonl"], "a.jsonl"),
        ({"path": "a.jsonl"}, "a.jsonl"),
        (DataSource("a.jsonl"), "a.jsonl"),
        ("a.jsonl=0.5", [DataSource("a.jsonl", weight=0.5)]),
        ("a=b.jsonl", "a=b.jsonl"),
        ("a=b.jsonl=1e1", [DataSource("a=b.jsonl", weight=10)]),
        ("=2", "=2"),
        (["a.jsonl", "b.jsonl=2"], [DataSource("a.jsonl"), DataSource("b.jsonl", weight=2)]),
        ({"path": "a.jsonl", "weight": "2"}, [DataSource("a.jsonl", weight=2)]),
        (
            ["a.jsonl", {"path": "b.jsonl", "name": "b"}],
            [DataSource("a.jsonl"), DataSource("b.jsonl", name="b")],
        ),
        ((OTHER, "a.jsonl"), [OTHER, DataSource("a.jsonl")]),
    ],
)
def test_strings_mappings_and_lists(given, meant):
    assert data(given) == meant


def test_a_pattern_that_matches_has_no_weight(tmp_path):
    folder = tmp_path / "part" / "year=2024"
    folder.mkdir(parents=True)
    assert data(f"{tmp_path}/*/year=2024") == f"{tmp_path}/*/year=2024"
    assert data(f"{tmp_path}/*/none=2024") == [DataSource(f"{tmp_path}/*/none", weight=2024)]


def test_a_file_of_that_name_has_no_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("date=2024").mkdir()
    assert data("date=2024") == "date=2024"
    assert data("date=2025") == [DataSource("date", weight=2025)]


def test_what_is_in_the_home_folder_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "year=2024").mkdir()
    assert data("~/year=2024") == "~/year=2024"
    assert data("~/y*=2024") == "~/y*=2024"
    assert data("~/year=2025") == [DataSource("~/year", weight=2025)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("a.jsonl=0", "weight=0.0: Input should be greater than 0"),
        ("a.jsonl=-1", "weight=-1.0: Input should be greater than 0"),
        ("a.jsonl=nan", "weight=nan: Input should be a finite number"),
        ({"path": "a", "weight": 0}, "weight=0: Input should be greater than 0"),
        (["a", {"path": "b", "weight": "much"}], "weight='much': Input should be a valid number"),
        ([{"path": "a", "wieght": 2}], "wieght: no such field of data; did you mean 'weight'?"),
        ([{"weight": 2}], "path: required, and was not given"),
        (
            {"path": "a", "columns": ["text"]},
            r"columns=\['text'\]: Input should be a valid dictionary",
        ),
        ("", "path='': "),
        ([], "an empty list; name at least one source"),
        (3, "3 is int; a source is a string or a mapping with 'path'"),
        ([["a"]], r"\['a'\] is list; a source is a string or a mapping"),
    ],
)
@pytest.mark.parametrize("field", ["data", "validation_data"])
def test_what_is_wrong_is_said_once_with_field_value_and_remedy(field, given, reason):
    with pytest.raises(ConfigurationError, match=f"^{field}(=.*)?: {reason}") as error:
        Recipe(**{"model": "m", "data": "a", field: given})
    assert str(error.value).count("Input should") <= 1


def test_validation_data_may_be_left_out():
    assert Recipe(model="m", data="a", validation_data=None).validation_data is None
    with pytest.raises(ConfigurationError, match="^data=None: "):
        Recipe(model="m", data=None)


def test_yaml_holds_what_was_said_and_nothing_else(tmp_path):
    recipe = Recipe(model="m", data=["a.jsonl", OTHER], validation_data="c.jsonl=2")
    recipe.to_yaml(tmp_path / "recipe.yaml")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == recipe
    assert recipe.to_dict()["data"][0] == {"path": "a.jsonl"}
    assert recipe.to_dict()["validation_data"] == [{"path": "c.jsonl", "weight": 2.0}]
    assert recipe.replace(seed=3).data == recipe.data


def test_the_configuration_knows_no_data():
    assert not hasattr(Recipe(model="m", data=["a.jsonl", OTHER]).config(), "data")


def test_a_source_is_frozen_and_takes_paths():
    source = DataSource(Path("a") / "b", None, "test", random.uniform(0.1, 3))
    assert (source.path, source.split) == ("a/b", "test")
    with pytest.raises(AttributeError):
        source.path = "c"


@pytest.mark.parametrize(
    "fields", [{"weight": -0.5}, {"clumns": {}}, {"columns": {"a": 1}}, {"path": 3}]
)
def test_errors_of_a_source_are_those_of_the_configuration(fields):
    with pytest.raises(ConfigurationError, match=f"^{next(iter(fields))}[=:]"):
        DataSource(**{"path": "a", **fields})


def test_flags_may_be_repeated():
    import typer
    from typer.testing import CliRunner

    from chronicals.cli.options import with_recipe_flags

    given = {}

    @with_recipe_flags
    def command(**flags):
        given.update(flags)

    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(
        app,
        ["--model", "m", "--data", "a.jsonl", "--data", "b.jsonl=0.5", "--validation-data", "c"],
    )
    assert done.exit_code == 0, done.output
    recipe = Recipe(**given)
    assert recipe.data == [DataSource("a.jsonl"), DataSource("b.jsonl", weight=0.5)]
    assert recipe.validation_data == "c" and recipe.explicit == {"model", "data", "validation_data"}
