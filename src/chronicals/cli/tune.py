"""``chronicals tune``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import PresetName
from chronicals.cli.options import (
    make_room_for,
    with_known_names,
    with_recipe_flags,
)
from chronicals.cli.wording import in_users_form

if TYPE_CHECKING:
    from rich.console import Console

    from chronicals.config import Recipe
    from chronicals.tuning import Tuner

LOOK_SECONDS = 0.2
"""Seconds between two looks at the tuner's events."""


@with_recipe_flags
def tune_command(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="YAML file with any of the fields below, as for train, and tune"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=2, help="Trials, the first with your own settings [30]")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What is compared: loss (held-out cross-entropy), a held-out metric of the "
            "objective, or tokens_per_second [the objective's]"
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="Folder of the study, which goes on if it is there [OUTPUT_DIR-study]"),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(help="Recipe into which the best settings are written, if they are better"),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="New file into which the trials are written for optuna-dashboard"),
    ] = None,
    preset: PresetName = None,
    **flags: Any,
) -> None:
    """Try settings of a run on its own data, and say which are best.

    `chronicals tune recipe.yaml` takes what `train` takes, with something held out, and a block
    `tune: {learning_rate: [1e-5, 1e-3, log], lora_rank: [8, 16, 64]}`. Each trial is a run of its
    own; the first has your own settings. The study is a folder: the same command goes on with it,
    however it ended.
    """
    from chronicals.config import Recipe
    from chronicals.config.presets import AUTO_PRESET
    from chronicals.tuning import Tuner

    make_room_for(apply, "apply")
    make_room_for(export, "export")
    given = with_known_names(Recipe.given(preset, recipe, **flags))
    if preset == AUTO_PRESET:
        from chronicals.planning.ways import with_way_of_this_machine

        given = with_way_of_this_machine(given)
    asked = {"trials": trials, "metric": metric}
    tune = {name: value for name, value in asked.items() if value is not None}
    in_file = {} if recipe is None else Recipe.read_yaml(recipe)
    tuner = Tuner(given, study, {**_settings_beside_flags(in_file, given), **tune})

    from rich.console import Console
    from rich.markup import escape

    from chronicals.tuning.report import REPORT_FILE

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    _follow(tuner, console)
    _show_results(tuner, console)
    console.print(f"[bold]report[/] {escape(str(tuner.study.folder / REPORT_FILE))}")
    if export is not None:
        count = tuner.export(export)
        console.print(f"{count} trials: optuna-dashboard {export}", markup=False)
    if apply is not None:
        console.print(tuner.apply(apply), markup=False)


def _settings_beside_flags(in_file: Mapping[str, Any], given: Recipe) -> dict[str, Any]:
    """Return the study's settings in a recipe's file whose dimensions ``--tune`` has replaced."""
    from chronicals.tuning.settings import NAMES

    tune = in_file.get("tune")
    if not isinstance(tune, Mapping):
        return {}
    return {name: tune[name] for name in tune if name in NAMES and name not in given.tune}


def _follow(tuner: Tuner, console: Console) -> None:
    """Run a study to its end, and print its events.

    Raises:
        Interrupted: Ctrl-C was pressed, or SIGTERM came; the study goes on with the same command.
    """
    import signal

    from chronicals.training.errors import Interrupted

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it means Ctrl-C, too
    tuner.start()
    try:
        while tuner.is_running():
            _show_events(tuner, console)
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        console.print("stopping: the trial finishes its step and saves")
        tuner.stop()
        raise Interrupted(
            f"stopped; the same command goes on with the study in {tuner.study.folder}"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    _show_events(tuner, console)
    if tuner.error is not None:
        raise tuner.error


def _show_events(tuner: Tuner, console: Console) -> None:
    for event in tuner.poll():
        if event.kind != "status":
            console.print(in_users_form(event.text), markup=False)


def _show_results(tuner: Tuner, console: Console) -> None:
    """Print the best trials beside the user's own settings, and whether they differ."""
    from rich import box
    from rich.table import Table

    from chronicals.tuning.report import shown_value

    results = tuner.results()
    if results is None:
        return
    table = Table("trial", tuner.settings.metric, *tuner.space.dimensions, box=box.SIMPLE)
    rows = {result.trial.number: result for result in (*results.best, results.own)}
    for number, result in rows.items():
        name = f"{number} (yours)" if number == 0 else str(number)
        values = [shown_value(value) for value in result.trial.params.values()]
        table.add_row(name, str(result), *values)
    console.print(table)
    reason = results.why_no_different()
    first = results.best[0]
    console.print(reason or f"trial {first.trial.number} is better than your own settings")
