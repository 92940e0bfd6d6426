"""``chronicals export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chronicals.cli.options import values_of


def export_command(
    model: Annotated[
        str, typer.Argument(help="Folder of a run, checkpoint, adapter, model or hub name")
    ],
    to: Annotated[
        list[str], typer.Option(help="Formats, with commas or repeated; `--to list` prints them")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the artefacts (default: MODEL/export)")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The model of an adapter, where it does not say or has moved")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the artefacts' names begin with (default: the folder's)"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Held-out rows: report how much of the training survives")
    ] = None,
    importance: Annotated[
        str | None, typer.Option(help="Rows by which llama.cpp's quantiser weighs errors")
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option(help="Python of an environment with vLLM, to compare with")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Repository to upload to; a new one is private")
    ] = None,
    ollama: Annotated[
        bool, typer.Option("--ollama", help="Write a Modelfile beside each GGUF file")
    ] = False,
) -> None:
    """Write a trained model for other programs, and prove that they read what was trained.

    `chronicals export chronicals-output --to merged,gguf-q8_0` merges an adapter where there is
    one, writes each format, and reads it back with its own client: transformers, PEFT, llama.cpp.
    What does not agree with the trained model is removed, and the exit code is 1. The comparisons
    lie beside each artefact as JSON.
    """
    import shlex

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from chronicals.export import FORMATS
    from chronicals.export import export as export_model

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    asked = values_of("to", to)
    if asked == ["list"]:
        console.print("\n".join(FORMATS))
        return
    for exported in export_model(
        model,
        asked,
        output,
        base_model,
        name=name,
        data=data,
        importance=importance,
        vllm_python=vllm_python,
        ollama=ollama,
        push_to_hub=push_to_hub,
    ):
        table = Table(
            "compared", "client", "result", "measure", "bound", title=escape(str(exported.path))
        )
        for check in exported.proof.checks:
            result = {
                True: "equal",
                False: "[red]differs[/]",
                None: "reported" if check.value is not None else "not run",
            }
            measure, bound = ("" if x is None else f"{x:.4g}" for x in (check.value, check.bound))
            table.add_row(
                escape(check.name),
                check.client,
                result[check.passed],
                measure or escape(check.detail),
                bound,
            )
        console.print(table)
        if exported.serve:
            console.print(f"serve it: {escape(exported.serve)}")
    console.print(f"next: chronicals generate {escape(shlex.quote(str(model)))}")
