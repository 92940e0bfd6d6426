"""``chronicals merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge_command(
    model: Annotated[str, typer.Argument(help="Adapter, checkpoint or folder of a run")],
    output: Annotated[Path, typer.Option(help="Folder for the merged model; it must not exist")],
    base_model: Annotated[
        str | None,
        typer.Option(help="The model of the adapter, where it does not say or has moved"),
    ] = None,
) -> None:
    """Write a whole model with the adapter in its weights.

    `chronicals merge chronicals-output --output merged`: for programs that know no adapters.
    Weights are summed in fp32 and rounded once to the dtype of the base's files, one at a time, so
    that the memory of the largest one is enough. Over a base that was in 4 bits the sums are those
    of its dequantised values. `merge.json` beside the model says what was added up, what each
    weight was changed by, what rounding lost, and how far it is from the base's files.
    """
    import shlex
    import statistics

    from rich.console import Console
    from rich.markup import escape

    from chronicals.export import merge

    merged = merge(model, output, base_model)
    changed = [made for made in merged.changes.values() if made.change]
    lost = max(made.lost for made in changed)
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    console.print(f"[bold]merged[/] {escape(merged.summands)}: {len(changed)} weights changed")
    console.print(
        "the adapter changes a weight by "
        f"{statistics.median(made.change for made in changed):.2%} of the norm of what it was "
        f"trained over (median; most {max(made.change for made in changed):.2%}); rounding loses "
        f"up to {lost:.2%} of a change"
    )
    moved = [made.from_files for made in merged.changes.values()]
    console.print(
        f"what is written is {statistics.median(moved):.2%} of its norm away from the weight in "
        "the files of "
        f"{escape(merged.base)} (median; most {max(moved):.2%})"
    )
    console.print(f"[bold]model[/]  {escape(str(merged.folder))}")
    console.print(f"next: chronicals generate {escape(shlex.quote(str(merged.folder)))}")
