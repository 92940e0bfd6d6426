"""``chronicals moe predict-train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from chronicals.moe.recall import Recalls


def predict_train(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a mixture of experts, which is not changed")],
    data: Annotated[str, typer.Option(help="What `train --data` takes")],
    output: Annotated[Path, typer.Option(help="Folder of the predictor")],
    held_out: Annotated[str | None, typer.Option(help="Data that recalls are measured on (default: some of --data)")] = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens that heads are trained on")] = 1_000_000,
    held_out_tokens: Annotated[int, typer.Option(min=1, help="Tokens that recalls are measured on")] = 50_000,
    layers_ahead: Annotated[int, typer.Option(min=0, help="Largest distance in layers")] = 3,
    tokens_ahead: Annotated[int, typer.Option(min=0, help="Largest distance in tokens; 0 for no such head")] = 2,
    rank: Annotated[int, typer.Option(min=1, help="Of the heads")] = 64,
    learning_rate: Annotated[float, typer.Option(min=1e-8, help="Peak learning rate")] = 3e-3,
    temperature: Annotated[float, typer.Option(min=1e-3, help="Of the distributions that heads learn")] = 1.0,
    max_seq_length: Annotated[int, typer.Option(min=2, help="Tokens in a pack")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Packs in a forward pass")] = 4,
    objective: Annotated[str, typer.Option(help="How rows are read: sft, or pretraining")] = "sft",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model")] = False,
) -> None:
    """Train heads that predict the experts of a frozen mixture.

    `chronicals moe predict-train MODEL --data FILE --output DIR` runs the model over the data, trains heads on what its routers
    do, measures on held-out data which share of the chosen experts they predict, and writes `predictor.safetensors` and
    `predictor.json`. The weights of the model are the same before and after, which is checked.
    """
    from chronicals.cli.moe_trace import loaded_mixture, recipe_of
    from chronicals.moe.distil_heads import Distillation, train_predictor
    from chronicals.moe.predictor import HeadSizes
    from chronicals.standard_json import to_json

    recipe = recipe_of(model, data, max_seq_length, batch_size, objective)
    unseen = None if held_out is None else recipe_of(model, held_out, max_seq_length, batch_size, objective).sources[0]
    loaded, tokenizer = loaded_mixture(model, trust_remote_code)
    how = Distillation(learning_rate=learning_rate, temperature=temperature)
    sizes = HeadSizes(layers_ahead, tokens_ahead, rank)
    given = loaded, tokenizer, recipe.sources[0], unseen, recipe.config()
    found = train_predictor(*given, sizes, how, tokens, held_out_tokens)
    found.predictor.save(output, found.about())
    _show(found.recalls)
    print(to_json(found.about()))  # noqa: T201


def _show(recalls: Recalls) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    table = Table("layers ahead", "heads", "worst layer", "among 2k", "later routers early", box=box.SIMPLE)
    for d in range(len(recalls.layer_ahead[0])):
        names = "layer_ahead", "layer_ahead_2k", "gate_reuse"
        heads, twice, early = (recalls.mean(d, name) for name in names)
        table.add_row(f"{d}", f"{heads:.1%}", f"{min(recalls.at(d)):.1%}", f"{twice:.1%}", f"{early:.1%}")
    console.print(table)
    for distance, row in enumerate(recalls.token_ahead, 1):
        console.print(f"{distance} tokens ahead: {sum(row) / len(row):.1%}, worst layer {min(row):.1%}")
    console.print(f"recall of the {recalls.k} chosen experts, {recalls.tokens:,} held-out tokens")
