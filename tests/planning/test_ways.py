"""The preset ``auto`` takes the first way that fits, by the shapes of the model alone."""

import pytest
import yaml
from transformers import LlamaConfig
from typer.testing import CliRunner

import tiny
from chronicals.cli.app import app
from chronicals.cli.wording import in_users_form
from chronicals.config import ConfigurationError, Recipe
from chronicals.planning.ways import with_way

GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's configuration: nothing else is read."""
    place = tmp_path_factory.mktemp("model")
    LlamaConfig(**tiny.PLANNED, architectures=["LlamaForCausalLM"]).save_pretrained(place)
    return place


def recipe(folder, **fields):
    return Recipe.given("auto", None, model=str(folder), data=["not read"], **fields)


@pytest.mark.parametrize(
    ("size", "fields", "way"),
    [
        (80, {}, (False, None)),
        (2, {}, (True, None)),
        (1.1, {}, (True, "nf4")),
        (80, {"use_lora": True}, (True, None)),
        (80, {"quantization": "nf4"}, (True, "nf4")),
    ],
)
def test_the_first_way_that_fits_is_taken(size, fields, way, folder):
    taken = with_way(recipe(folder, **fields), int(size * GB))
    assert (taken.use_lora, taken.quantization) == way and taken.fit == "settings"


def test_without_a_card_it_is_an_error(folder):
    with pytest.raises(ConfigurationError, match="preset='auto': there is no card here"):
        with_way(recipe(folder), 0)


def test_where_no_way_fits_it_says_what_would_do(folder):
    with pytest.raises(ConfigurationError, match="no way to train this model fits 1 x 0.3 GB; a"):
        with_way(recipe(folder), int(0.3 * GB))


def planned(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_plan_writes_the_recipe_that_train_reads(folder, tmp_path):
    """With the settings that were taken and the fields that were given, and no others."""
    file = tmp_path / "recipe.yaml"
    done = planned(
        "--model",
        folder,
        "--data",
        "rows.jsonl",
        "--gpus",
        1,
        "--gpu-memory",
        "4GB",
        "--fit",
        "settings",
        "--output",
        file,
        "--seed",
        7,
    )
    assert done.exit_code == 0, done.output
    assert "fit: the fastest settings that fit: --" in done.output
    written = yaml.safe_load(file.read_text())
    assert written.keys() >= {"memory", "model", "data", "seed"} and "gpu_memory" not in written
    given = Recipe.given(None, file)
    assert given.seed == 7 and given.fit == "off" and given.memory[0] == "auto"


def test_a_recipe_of_a_plan_without_data_names_none(folder, tmp_path):
    file = tmp_path / "recipe.yaml"
    done = planned("--model", folder, "--gpus", 1, "--preset", "qlora-8gb", "--output", file)
    assert done.exit_code == 0, done.output
    written = yaml.safe_load(file.read_text())
    assert written["quantization"] == "nf4" and "data" not in written and "fit" not in written


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--gpu-memory", "16 furlongs"], "--gpu-memory '16 furlongs': the unit furlongs"),
        (["--gpu-memory", "0"], "--gpu-memory 0: is not above 0 and at most 10 TB"),
        (["--gpu-memory", "-5"], "--gpu-memory -5: is not above 0 and at most 10 TB"),
        (["--gpu-memory", "20TB"], "--gpu-memory 20TB: is not above 0 and at most 10 TB"),
        (["--fit", "often"], "--fit often: Input should be 'off', 'settings'"),
        (["--model", "nowhere/at-all"], "--model nowhere/at-all: "),
        (["--max-steps", "3", "--num-epochs", "2"], "--num-epochs 2 and --max-steps 3: give"),
        (["--preset", "auto"], "--preset auto: there is no card here"),
        (["--preset", "qlora-20gb"], "--preset qlora-20gb: no such preset; there are fast"),
    ],
)
def test_bad_input_is_answered_in_one_line_with_the_field(given, line, folder):
    model = [] if "--model" in given else ["--model", folder]
    done = planned(*model, "--gpus", 1, *given)
    said = in_users_form(str(done.exception))
    assert done.exit_code and said.startswith(line) and "\n" not in said
