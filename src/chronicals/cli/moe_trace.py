"""``chronicals moe trace``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from chronicals.config import Recipe


def trace(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a mixture of experts")],
    data: Annotated[str, typer.Option(help="What `train --data` takes")],
    output: Annotated[Path, typer.Option(help="Folder of the trace")],
    tokens: Annotated[int | None, typer.Option(min=1, help="End after so many tokens (default: all of the data)")] = None,
    features: Annotated[
        bool, typer.Option("--features", help="Also what heads predict from: 2 bytes for each layer and channel of a token")
    ] = False,
    max_seq_length: Annotated[int, typer.Option(min=2, help="Tokens in a pack")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Packs in a forward pass, and in a file")] = 4,
    objective: Annotated[str, typer.Option(help="How rows are read: sft, or pretraining")] = "sft",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model")] = False,
) -> None:
    """Write down which experts a mixture's routers choose.

    `chronicals moe trace MODEL --data FILE --output DIR` runs the model over the data and writes for each token of each layer
    the chosen experts, their weights and the router's logits to `trace-*.npz`, and to `trace.json` what they are.
    """
    from chronicals.moe.mixture_parts import mixture_layers
    from chronicals.moe.recording import record_data
    from chronicals.moe.routers import experts_per_token
    from chronicals.moe.trace import TraceInfo, TraceWriter

    recipe = recipe_of(model, data, max_seq_length, batch_size, objective)
    loaded, tokenizer = loaded_mixture(model, trust_remote_code)
    mixture_layers(loaded)
    writer = TraceWriter(output, TraceInfo.of(loaded, experts_per_token(loaded), features, model))
    for recorded in record_data(loaded, tokenizer, recipe.sources[0], recipe.config(), features, tokens):
        writer.add(recorded)
    info = writer.close()
    print(f"{output}: {info.tokens:,} tokens, {len(info.layers)} layers of {info.num_experts} experts, k={info.k}")  # noqa: T201


def recipe_of(model: str, data: str, max_seq_length: int, batch_size: int, objective: str) -> Recipe:
    """How data are read."""
    from chronicals.config import Recipe

    fields: dict[str, Any] = {"model": model, "data": [data], "max_seq_length": max_seq_length, "batch_size": batch_size}
    return Recipe(**fields, gradient_accumulation_steps=1, objective=objective)


def loaded_mixture(model: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model, on the card if there is one, and its tokenizer."""
    import torch

    from chronicals.generation import load_trained

    trained = load_trained(model, None, trust_remote_code)
    return trained.model.to("cuda" if torch.cuda.is_available() else "cpu"), trained.tokenizer
