"""``chronicals evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[str, typer.Argument(help="Model, adapter, checkpoint or folder of a run")],
    data: Annotated[Path, typer.Option(help="File to evaluate on: .jsonl or plain text")],
    base_model: Annotated[str | None, typer.Option(help="The model of an adapter, where it does not say")] = None,
    max_seq_length: Annotated[int, typer.Option(help="Tokens in a pack")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Packs in a forward pass")] = 1,
    output: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model")] = False,
) -> None:
    """Held-out loss, perplexity and token accuracy, as a table and as JSON.

    Means over every trained target of the file; the tokenisation is the one of training.
    """
    from rich.console import Console
    from rich.table import Table

    from chronicals.config import ChronicalsConfig
    from chronicals.generation import load_trained
    from chronicals.training.evaluation import evaluate_file

    trained = load_trained(model, base_model, trust_remote_code)
    config = ChronicalsConfig(max_seq_length=max_seq_length, batch_size=batch_size, gradient_accumulation_steps=1)
    figures = evaluate_file(trained.model, trained.tokenizer, data, config).to_dict()
    table = Table("measure", "value")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else f"{value:,}")
    Console(stderr=True).print(table)
    print(json.dumps(figures))  # noqa: T201
    if output is not None:
        output.write_text(json.dumps(figures, indent=2))
