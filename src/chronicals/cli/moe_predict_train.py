"""``chronicals moe predict-train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from chronicals.moe.lookahead.predictor import Recalls


def predict_train(
    model: Annotated[
        str,
        typer.Argument(
            help="Mixture of experts, which is not changed: model, adapter, checkpoint or folder "
            "of a run"
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the predictor")],
    data: Annotated[
        str | None, typer.Option(help="What `train --data` takes, which the model runs over once")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Folder of a trace of the model with --features, in the place of --data"),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Data, or beside --trace a trace, that recalls are measured on (default: the "
            "first of it)"
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1000, help="Tokens that heads are trained on, of a trace in each pass"),
    ] = 1_000_000,
    passes: Annotated[
        int | None,
        typer.Option(min=1, help="Over the trace, its parts in another order each (default: 1)"),
    ] = None,
    held_out_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that recalls are measured on")
    ] = 50_000,
    layers_ahead: Annotated[int, typer.Option(min=0, help="Largest distance in layers")] = 3,
    tokens_ahead: Annotated[
        int, typer.Option(min=0, help="Largest distance in tokens; 0 for no such head")
    ] = 2,
    rank: Annotated[int, typer.Option(min=1, help="Of the heads")] = 64,
    learning_rate: Annotated[float, typer.Option(min=1e-8, help="Peak learning rate")] = 3e-3,
    temperature: Annotated[
        float, typer.Option(min=1e-3, help="Of the distributions that heads learn")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of new heads, and of the order of a trace")] = 0,
    max_seq_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a pack of --data (default: 2048)")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Packs in a forward pass (default: 4)")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="How rows of --data are read: sft, or pretraining (default: sft)"),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Base model of an adapter, where the adapter does not name it"),
    ] = None,
    load_in_4bit: Annotated[
        bool,
        typer.Option(
            "--load-in-4bit",
            help="Model, or base of an adapter, in 4 bits (default: as it was trained)",
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model")
    ] = False,
) -> None:
    """Train heads that predict the experts of a frozen mixture.

    `chronicals moe predict-train MODEL --data FILE --output DIR` runs the model over the data,
    trains heads on what its routers do, measures on held-out data which share of the chosen experts
    they predict, and writes `predictor.safetensors` and `predictor.json`. With `--trace DIR` it
    reads what `chronicals moe trace MODEL --features` wrote, and the model does not run. The
    weights of the model are the same before and after, which is checked.
    """
    from chronicals.cli.moe_trace import loaded_mixture, recipe_of
    from chronicals.moe.lookahead.distil_heads import HeadDistillation
    from chronicals.moe.lookahead.predictor import HeadSizes
    from chronicals.moe.lookahead.train_predictor import train_from_trace, train_predictor
    from chronicals.standard_json import to_json

    of_data = {"max_seq_length": max_seq_length, "batch_size": batch_size, "objective": objective}
    _check(data, trace, passes, of_data)
    how = HeadDistillation(
        learning_rate=learning_rate, temperature=temperature, passes=passes or 1, seed=seed
    )
    sizes = HeadSizes(layers_ahead, tokens_ahead, rank)
    most = (tokens, held_out_tokens)
    if data is None:
        assert trace is not None
        loaded, _ = loaded_mixture(model, base_model, load_in_4bit, trust_remote_code)
        found = train_from_trace(
            loaded, trace, None if held_out is None else Path(held_out), sizes, how, *most
        )
    else:
        read = max_seq_length or 2048, batch_size or 4, objective or "sft"
        recipe = recipe_of(model, data, *read)
        unseen = None if held_out is None else recipe_of(model, held_out, *read).sources[0]
        loaded, tokenizer = loaded_mixture(model, base_model, load_in_4bit, trust_remote_code)
        found = train_predictor(
            loaded, tokenizer, recipe.sources[0], unseen, recipe.config(), sizes, how, *most
        )
    found.predictor.save(output, found.about())
    _show(found.recalls)
    print(to_json(found.about()))  # noqa: T201


def _check(
    data: str | None, trace: Path | None, passes: int | None, of_data: dict[str, Any]
) -> None:
    """Check that the options do not contradict each other.

    Raises:
        ConfigurationError: they do.
    """
    from chronicals.config import ConfigurationError

    if (data is None) == (trace is None):
        raise ConfigurationError(
            f"data={data!r} and trace={str(trace) if trace else None!r}: give one of the two"
        )
    if trace is None and passes is not None:
        raise ConfigurationError(
            f"passes={passes}: the model runs over data once; leave it out, or record a trace and "
            "give it"
        )
    given = [name for name, value in of_data.items() if value is not None]
    if trace is not None and given:
        raise ConfigurationError(
            f"{given[0]}={of_data[given[0]]!r}: is for data, and a trace holds tokens; leave it out"
        )


def _show(recalls: Recalls) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    table = Table(
        "layers ahead", "heads", "worst layer", "among 2k", "later routers early", box=box.SIMPLE
    )
    for d in range(len(recalls.layer_ahead[0])):
        names = "layer_ahead", "layer_ahead_2k", "gate_reuse"
        heads, twice, early = (recalls.mean(d, name) for name in names)
        table.add_row(
            f"{d}", f"{heads:.1%}", f"{min(recalls.at(d)):.1%}", f"{twice:.1%}", f"{early:.1%}"
        )
    console.print(table)
    for distance, row in enumerate(recalls.token_ahead, 1):
        console.print(
            f"{distance} tokens ahead: {sum(row) / len(row):.1%}, worst layer {min(row):.1%}"
        )
    console.print(f"recall of the {recalls.k} chosen experts, {recalls.tokens:,} held-out tokens")
