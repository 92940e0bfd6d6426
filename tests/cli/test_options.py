import inspect

import pytest

from chronicals.cli.options import with_recipe_flags
from chronicals.config import Recipe


@pytest.mark.parametrize("name, kind", [("trackers", list[str]), ("lora_target_modules", list[str]), ("project", str)])
def test_a_list_may_be_repeated_as_a_flag(name, kind):
    def command(**flags):
        return flags

    command = with_recipe_flags(command)
    assert inspect.signature(command).parameters[name].annotation == kind | None
    assert command(trackers=["wandb", "mlflow"], project=None) == {"trackers": ["wandb", "mlflow"]}


@pytest.mark.parametrize(
    "given, meant",
    [
        (["q_proj"], ["q_proj"]),
        (["model.layers.0.mlp.up_proj"], ["model.layers.0.mlp.up_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["all-linear"], "all-linear"),
        ([r".*\.(q|v)_proj"], r".*\.(q|v)_proj"),
        ([".*q_proj", "v_proj"], [".*q_proj", "v_proj"]),
    ],
)
def test_layers_to_adapt_are_names_or_one_regular_expression(given, meant):
    command = with_recipe_flags(lambda **flags: Recipe(model="m", data="d", **flags).lora_target_modules)
    assert command(lora_target_modules=given) == meant
