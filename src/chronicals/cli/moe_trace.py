"""``chronicals moe trace``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from chronicals.config import Recipe


def trace(
    model: Annotated[
        str,
        typer.Argument(help="Mixture of experts: model, adapter, checkpoint or folder of a run"),
    ],
    data: Annotated[str, typer.Option(help="What `train --data` takes")],
    output: Annotated[Path, typer.Option(help="Folder of the trace")],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="End after so many tokens (default: all of the data)")
    ] = None,
    features: Annotated[
        bool,
        typer.Option(
            "--features",
            help="Also what heads predict from: 2 bytes for each layer and channel of a token",
        ),
    ] = False,
    max_seq_length: Annotated[int, typer.Option(min=2, help="Tokens in a pack")] = 2048,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Packs in a forward pass, and in a file")
    ] = 4,
    objective: Annotated[str, typer.Option(help="How rows are read: sft, or pretraining")] = "sft",
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
    """Write down which experts a mixture's routers choose.

    `chronicals moe trace MODEL --data FILE --output DIR` runs the model over the data and writes
    for each token of each layer the chosen experts, their weights and the router's logits to
    `trace-*.npz`, and to `trace.json` what they are.
    """
    from chronicals.moe.lookahead.trace import record_trace

    recipe = recipe_of(model, data, max_seq_length, batch_size, objective)
    loaded, tokenizer = loaded_mixture(model, base_model, load_in_4bit, trust_remote_code)
    info = record_trace(
        loaded, tokenizer, recipe.sources[0], recipe.config(), output, features, tokens, model
    )
    size = f"{len(info.layers)} layers of {info.num_experts} experts, k={info.k}"
    print(f"{output}: {info.tokens:,} tokens, {size}")  # noqa: T201


def recipe_of(
    model: str, data: str, max_seq_length: int, batch_size: int, objective: str
) -> Recipe:
    """Return the recipe by which data are read."""
    from chronicals.config import Recipe

    fields: dict[str, Any] = {
        "model": model,
        "data": [data],
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
    }
    return Recipe(**fields, gradient_accumulation_steps=1, objective=objective)


def loaded_mixture(
    model: str, base_model: str | None, load_in_4bit: bool, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Load the model, onto the card if there is one, and its tokenizer.

    Raises:
        ValueError: it cannot be loaded, or is no mixture of experts.
    """
    import torch

    from chronicals.generation import load_trained
    from chronicals.moe.routers import mixture_layers
    from chronicals.saving import SavedModel

    def load(saved: SavedModel, dtype: torch.dtype, trusted: bool) -> Any:
        return saved.model(dtype, trusted, "nf4" if load_in_4bit else None)

    trained = load_trained(model, base_model, trust_remote_code, load)
    mixture_layers(trained.model)
    return trained.model, trained.tokenizer
