"""Options that several commands have, in the same words."""

from __future__ import annotations

from typing import Annotated

import typer

from chronicals.config.presets import PRESET_WORDS

PresetName = Annotated[str | None, typer.Option(help=f"Start from a preset: {PRESET_WORDS}")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]

TrainedModel = Annotated[str, typer.Argument(help="Model, adapter, checkpoint or folder of a run")]
BaseModel = Annotated[
    str | None,
    typer.Option(help="Base model of an adapter, where the adapter does not name it"),
]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run Python code that comes with the model")]

ChatTemplate = Annotated[
    str | None,
    typer.Option(help="For a tokenizer without one: chatml, llama3, ... or a file with Jinja text"),
]
ColumnNames = Annotated[
    list[str] | None, typer.Option(help="Names of columns, THEIRS=OURS: question=prompt")
]
Overlong = Annotated[
    str | None, typer.Option(help="What becomes of longer rows: cut, split or drop")
]
