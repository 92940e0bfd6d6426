"""``chronicals convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from chronicals.convert import Conversion

LONGEST_VALUE = 40
"""Characters of a value in the table; the recipe has it whole."""


def convert_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML file of Axolotl, LLaMA-Factory or TRL, or a script with TRL's command line"
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="The recipe that is written; one that is there stays")
    ] = Path("recipe.yaml"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a recipe that is there")
    ] = False,
    cards: Annotated[
        int | None,
        typer.Option(min=1, help="Cards that theirs ran on [what its command line says, or 1]"),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cards that ours runs on: micro-batches are added until a step has as many "
            "documents [as many as theirs]",
        ),
    ] = None,
) -> None:
    """Write the recipe that another tool's configuration stands for.

    `chronicals convert axolotl.yaml` prints what becomes of each setting: mapped to ours, not needed
    here, or not there. `chronicals train recipe.yaml --check` then says what the run would be.
    """
    from chronicals.config import ConfigurationError
    from chronicals.convert import convert

    if output.exists() and not overwrite:
        raise ConfigurationError(
            f"output={str(output)!r}: is there already; name another file, or give --overwrite"
        )
    conversion = convert(file, cards, nproc)
    _show(conversion)
    text = conversion.text()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)

    from rich.console import Console

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    counts = [
        f"{sum(line.answer.kind == kind for line in conversion.lines)} {kind}"
        for kind in ("mapped", "not needed", "not there", "not known")
    ]
    console.print(f"[bold]{conversion.theirs.tool}[/] {', '.join(counts)}; the recipe is {output}")


def _show(conversion: Conversion) -> None:
    """Print what became of each setting; those that were not set are left out."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("line", "theirs", "becomes", "why"):
        table.add_column(column, overflow="fold", justify="right" if column == "line" else "left")
    for line in conversion.lines:
        setting, answer = line.setting, line.answer
        if setting.value is None:
            continue
        value = str(setting.value)
        value = value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 1]}…"
        ours = ", ".join(f"{name}: {one}" for name, one in answer.fields.items())
        cells = (f"{setting.name}: {value}", ours or answer.kind, answer.reason)
        table.add_row(str(setting.line), *map(escape, cells))
    Console(highlight=False).print(table)
