"""Search spaces: what is refused before a trial, and what a trial's values stand for."""

import dataclasses

import pytest
from scripted import recipe, tuner

from chronicals.config import ConfigurationError, Recipe
from chronicals.objectives import OBJECTIVES
from chronicals.tuning import fields
from chronicals.tuning.default_space import STRENGTH, default_metric, default_space
from chronicals.tuning.fields import SPEED
from chronicals.tuning.settings import divided
from chronicals.tuning.space import Choice, Interval, SearchSpace


def space(tmp_path, metric="loss", tuned=None, **own):
    return SearchSpace.of(tuned, recipe(tmp_path, **own), metric)


@pytest.mark.parametrize(
    "name, values, said",
    [
        ("learning_rat", [1e-5, 1e-3, "log"], "did you mean 'learning_rate'"),
        ("lr", [1e-5, 1e-3, "log"], "use learning_rate"),
        ("learning_rate", [1e-3, 1e-5, "log"], r"upside down; write \[1e-05, 0.001, log\]"),
        ("learning_rate", [0.0, 1e-3, "log"], "begins above 0"),
        ("learning_rate", ["a", 1e-3, "log"], "ends of a range are numbers"),
        ("learning_rate", [1e-4], "leaves no choice"),
        ("learning_rate", 1e-4, "leaves no choice"),
        ("learning_rate", [], "leaves no choice"),
        ("learning_rate", [1e-4, 1e-4], "leaves no choice"),
        ("learning_rate", [1e-4, 1e-4, "log"], "leaves no choice"),
        ("learning_rate", [-1.0, 1.0, "linear"], "learning_rate=-1.0: .* greater than 0"),
        ("batch_size", [2, 4.5], "batch_size=4.5"),
        ("max_seq_length", [512, 1024], "changes what is predicted of the held-out rows"),
        ("chat_template", ["chatml", "llama3"], "changes what is predicted of the held-out rows"),
        ("memory", ["auto", "recompute_layers"], "changes memory or speed alone"),
        ("seed", [1, 2], "is the same for all trials"),
        ("lora_rank", [8, 16], "changes nothing where all weights are trained"),
        ("router.balanc", [0.1, 0.5], "balanc.*no such setting"),
        ("router.balance", [-0.1, 0.5], "greater than or equal to 0"),
        ("dpo.beta", [0.1, 0.5], "'dpo' is not the objective of the recipe, which is 'sft'"),
    ],
)
def test_a_wrong_dimension_is_one_line(tmp_path, name, values, said):
    with pytest.raises(ConfigurationError, match=said) as raised:
        tuner(tmp_path, {name: values})
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "study").exists()


def test_all_mistakes_are_told_together(tmp_path):
    with pytest.raises(ConfigurationError) as raised:
        tuner(tmp_path, {"learning_rat": [1, 2], "weight_decay": [0.1]})
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"trials": 1}, "trials.*greater than 1"),
        ({"pruner": "best"}, "pruner.*'median'"),
        ({"repeats": -1}, "repeats.*greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path, settings, said):
    with pytest.raises(ConfigurationError, match=said) as raised:
        tuner(tmp_path, **settings)
    assert len(str(raised.value).splitlines()) == 1


def test_nothing_held_out_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing is held out.*validation_split"):
        tuner(tmp_path, fields={"validation_split": 0.0})


def test_without_optuna_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("chronicals.tuning.search.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'chronicals\[tune\]'") as raised:
        tuner(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


def test_every_field_has_one_effect():
    groups = [fields.LEARNING, fields.ROUNDING, fields.COST, fields.HELD_OUT, fields.OF_THE_STUDY]
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Recipe))


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "max_seq_length", "dpo.beta"])
def test_what_is_trained_is_not_tuned_by_speed(name):
    assert "tune it by a held-out score" in (fields.why_not_compared(name, "sft", SPEED) or "")


@pytest.mark.parametrize("name", ["memory", "batch_size", "use_fp8", "logits_chunk_size"])
def test_memory_and_rounding_are_tuned_by_speed(name):
    assert fields.why_not_compared(name, "sft", SPEED) is None


@pytest.mark.parametrize(
    "objective, metric, compared",
    [
        ("sft", "loss", True),
        ("distill", "loss", True),
        ("grpo", "loss", True),
        ("dpo", "loss", False),
        ("kto", "loss", False),
        ("dpo", "rewards/accuracies", True),
    ],
)
def test_a_loss_is_never_compared_with_the_weights_that_are_tuned(objective, metric, compared):
    reason = fields.why_not_compared(f"{objective}.beta", objective, metric)
    assert (reason is None) is compared
    assert (fields.why_not_compared("router.balance", objective, metric) is None) is compared


def test_texts_of_yaml_are_numbers(tmp_path):
    tuned = {"learning_rate": ["1e-5", "1e-3", "log"], "weight_decay": [0, "1e-1"]}
    found = space(tmp_path, tuned=tuned).dimensions
    assert found["learning_rate"] == Interval(1e-5, 1e-3, "log")
    assert found["weight_decay"] == Choice((0, 0.1))


def test_alpha_keeps_the_ratio_of_the_recipe(tmp_path):
    own = {"use_lora": True, "lora_rank": 16, "lora_alpha": 32}
    found = space(tmp_path, tuned={"lora_rank": [8, 64]}, **own)
    assert found.recipe_of({"lora_rank": 8}).lora_alpha == 16
    assert found.flat_fields({"lora_rank": 8}) == {"lora_rank": 8, "lora_alpha": 16.0}
    both = space(tmp_path, tuned={"lora_rank": [8, 64], "lora_alpha_ratio": [1, 4]}, **own)
    assert both.recipe_of({"lora_rank": 64, "lora_alpha_ratio": 4}).lora_alpha == 256
    assert both.own() == {"lora_rank": 16, "lora_alpha_ratio": 2.0}
    apart = space(tmp_path, tuned={"lora_rank": [8, 64], "lora_alpha": [8, 16]}, **own)
    assert apart.recipe_of({"lora_rank": 64, "lora_alpha": 8}).lora_alpha == 8


def test_settings_of_the_objective_have_its_name_before_them(tmp_path):
    own = {"objective": "dpo", "dpo": {"reference_model": "r"}}
    found = space(tmp_path, "rewards/accuracies", {"dpo.beta": [0.01, 0.5, "log"]}, **own)
    assert found.own() == {"dpo.beta": 0.1}
    assert found.flat_fields({"dpo.beta": 0.2}) == {"dpo.beta": 0.2}
    assert found.recipe_of({"dpo.beta": 0.2}).sections == {
        "dpo": {"reference_model": "r", "beta": 0.2}
    }


def test_one_of_two_exclusive_fields_makes_way(tmp_path):
    found = space(tmp_path, tuned={"warmup_ratio": [0.0, 0.1]}, warmup_steps=5)
    assert found.recipe_of({"warmup_ratio": 0.1}).warmup_ratio == 0.1


def test_settings_stand_beside_the_dimensions():
    settings, dimensions = divided({"trials": 7, "learning_rate": [1, 2], "pruner": False})
    assert (settings.trials, settings.pruner) == (7, "none")
    assert dimensions == {"learning_rate": [1, 2]}


@pytest.mark.parametrize(
    "metric, maximizes",
    [("loss", False), ("rewards/accuracies", True), ("token_accuracy", True), (SPEED, True)],
)
def test_the_better_direction_is_known_by_the_name(metric, maximizes):
    assert divided({"metric": metric})[0].maximizes is maximizes
    assert divided({"metric": metric, "direction": "minimize"})[0].maximizes is False


def test_the_flag_reads_as_the_recipe(tmp_path):
    texts = ["learning_rate=[1e-5, 1e-3, log]", "lora_rank=[8, 16]"]
    read = Recipe(model="m", data="d", tune=texts).tune
    assert read == {"learning_rate": ["1e-5", "1e-3", "log"], "lora_rank": [8, 16]}
    with pytest.raises(ConfigurationError, match=r"tune=.*is not NAME=\[VALUE, VALUE\]"):
        Recipe(model="m", data="d", tune=["learning_rate"])


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_has_a_space(tmp_path, name, use_lora):
    settings = {"distill": {"teacher": "t"}, "dpo": {"reference_model": "r"}}
    settings |= {"ipo": {"reference_model": "r"}, "kto": {"reference_model": "r"}}
    section = {name: settings[name]} if name in settings else {}
    rewards = {"rewards": ["arithmetic"]} if name in ("grpo", "rloo") else {}
    own = recipe(tmp_path, objective=name, use_lora=use_lora, **section, **rewards)
    metric = default_metric(name)
    made = SearchSpace.of(default_space(own, metric), own, metric)
    assert "learning_rate" in made.dimensions
    assert ("lora_rank" in made.dimensions) is use_lora
    if name in STRENGTH:
        setting = f"{name}.{STRENGTH[name]}"
        assert made.dimensions[setting].holds(made.own()[setting])


def test_the_space_of_a_speed_leaves_what_is_learned(tmp_path):
    own = recipe(tmp_path, validation_split=0.0)
    made = SearchSpace.of(default_space(own, SPEED), own, SPEED)
    assert {"batch_size", "memory", "logits_chunk_size"} == made.dimensions.keys()


def test_the_first_trial_is_the_users_own_recipe(tmp_path):
    """Also where a setting that was left out has a default that may not be written alone."""
    tuned = {"router.balance": [1e-3, 1e-1, "log"], "learning_rate": [1e-5, 1e-3, "log"]}
    found = space(tmp_path, tuned=tuned)
    assert found.own()["router.balance"] == 0.0
    assert found.recipe_of(found.own()) == found.recipe
