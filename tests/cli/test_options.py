import inspect

import pytest

from chronicals.cli.options import with_recipe_flags


@pytest.mark.parametrize("name, kind", [("trackers", list[str]), ("lora_target_modules", list[str]), ("project", str)])
def test_a_list_may_be_repeated_as_a_flag(name, kind):
    def command(**flags):
        return flags

    command = with_recipe_flags(command)
    assert inspect.signature(command).parameters[name].annotation == kind | None
    assert command(trackers=["wandb", "mlflow"], project=None) == {"trackers": ["wandb", "mlflow"]}
