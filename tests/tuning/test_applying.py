"""Best settings written into a recipe: their fields, and nothing else of the file."""

import pytest
import yaml

from chronicals.config import ConfigurationError, Recipe
from chronicals.tuning.applying import write_fields

RECIPE = """\
# My recipe.
model: m   # small
data: d
learning_rate: 1e-4  # from the paper

lora_rank: 8
use_lora: true
lora_target_modules:
- q_proj
- v_proj
# the end
"""


def applied(tmp_path, text, fields, words="study s, trial 3, loss 1.2"):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    write_fields(file, fields, words)
    return file.read_text()


def test_only_the_fields_change(tmp_path):
    text = applied(tmp_path, RECIPE, {"learning_rate": 3e-4, "lora_rank": 32})
    assert text == RECIPE.replace(
        "learning_rate: 1e-4  #",
        "# tuned: study s, trial 3, loss 1.2\nlearning_rate: 0.0003  #",
    ).replace("lora_rank: 8", "# tuned: study s, trial 3, loss 1.2\nlora_rank: 32")


def test_applied_again_the_comment_is_replaced(tmp_path):
    once = applied(tmp_path, RECIPE, {"learning_rate": 3e-4})
    twice = applied(tmp_path, once, {"learning_rate": 5e-4}, "study s, trial 9, loss 1.1")
    assert "trial 3" not in twice and twice.count("# tuned:") == 1
    assert twice == once.replace("0.0003", "0.0005").replace(
        "trial 3, loss 1.2", "trial 9, loss 1.1"
    )


def test_a_field_that_was_left_out_comes_last(tmp_path):
    text = applied(tmp_path, RECIPE.rstrip("\n"), {"weight_decay": 0.01})
    assert text == RECIPE + "# tuned: study s, trial 3, loss 1.2\nweight_decay: 0.01\n"


def test_a_list_in_lines_is_replaced_whole(tmp_path):
    text = applied(tmp_path, RECIPE, {"lora_target_modules": ["o_proj"]})
    assert yaml.safe_load(text)["lora_target_modules"] == ["o_proj"]
    assert "v_proj" not in text and text.endswith("# the end\n")


def test_the_other_of_two_exclusive_fields_goes(tmp_path):
    text = applied(tmp_path, RECIPE + "warmup_steps: 10\nseed: 1\n", {"warmup_ratio": 0.1})
    assert "warmup_steps" not in text and yaml.safe_load(text)["seed"] == 1
    assert Recipe.from_yaml(tmp_path / "recipe.yaml").warmup_ratio == 0.1


@pytest.mark.parametrize(
    "section",
    [
        "dpo: {beta: 0.1, reference: adapters_off}\n",
        "dpo: {reference: adapters_off}\n",
        "dpo:\n  # strength\n  beta: 0.1\n  reference: adapters_off\nseed: 3\n",
        "dpo:\n  reference: adapters_off\n\nseed: 3\n",
        "dpo:\n",
        "",
    ],
)
def test_settings_of_a_section(tmp_path, section):
    before = "model: m\ndata: d\nobjective: dpo\n" + section
    text = applied(tmp_path, before, {"sections": {"dpo": {"beta": 0.3}}})
    kept = yaml.safe_load(before)
    kept["dpo"] = {**(kept.get("dpo") or {}), "beta": 0.3}
    assert yaml.safe_load(text) == kept
    assert text.count("# tuned: study s") == 1
    assert "# strength" in text or "# strength" not in before


def test_a_recipe_between_braces_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="between braces"):
        applied(tmp_path, "{model: m, data: d}\n", {"learning_rate": 1e-3})
    assert (tmp_path / "recipe.yaml").read_text() == "{model: m, data: d}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
