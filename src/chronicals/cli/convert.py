"""``chronicals convert``."""

from __future__ import annotations

from collections import Counter
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
    tool = conversion.theirs.tool
    console.print(f"[bold]{tool}[/] {_counts(conversion)}; the recipe is {output}")


def _counts(conversion: Conversion) -> str:
    """Return how many settings became of each kind: ``12 mapped, 3 not needed, …``."""
    from chronicals.convert.answers import KINDS

    counted = Counter(line.answer.kind for line in conversion.lines)
    return ", ".join(f"{counted[kind]} {kind}" for kind in KINDS)


def _show(conversion: Conversion) -> None:
    """Print what became of each setting; those that were not set are left out."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("line", justify="right")
    for column in ("theirs", "becomes", "why"):
        table.add_column(column, overflow="fold")
    for line in conversion.lines:
        setting = line.setting
        if setting.value is None:
            continue
        value = str(setting.value)
        if len(value) > LONGEST_VALUE:
            value = f"{value[: LONGEST_VALUE - 1]}…"
        fields = [f"{name}: {one}" for name, one in line.answer.fields.items()]
        table.add_row(
            str(setting.line),
            escape(f"{setting.name}: {value}"),
            escape(", ".join(fields) or line.answer.kind),
            escape(line.answer.reason),
        )
    Console(highlight=False).print(table)
