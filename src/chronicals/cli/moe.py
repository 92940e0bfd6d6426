"""``chronicals moe``: mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import BaseModel, TrustRemoteCode
from chronicals.cli.expert_options import ExpertMemory, ExpertPredictor, OffloadExperts, placing
from chronicals.cli.options import Command, values_of

if TYPE_CHECKING:
    from chronicals.config import Recipe
    from chronicals.moe.lookahead.predictor import Recalls

moe_commands = typer.Typer(name="moe", no_args_is_help=True)

In4Bits = Annotated[
    bool,
    typer.Option(
        "--load-in-4bit",
        help="Model, or base of an adapter, in 4 bits (default: as it was trained)",
    ),
]


@moe_commands.callback()
def moe() -> None:
    """Mixtures of experts: make one, look at its routers, learn to predict them."""


@moe_commands.command(cls=Command)
def new(
    output: Annotated[Path, typer.Argument(help="Folder of the model")],
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub name of the model whose tokenizer it gets")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Sizes, NAME=VALUE, as num_experts=32, with commas or repeated"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16, fp16 or fp32")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights")] = 42,
    count: Annotated[
        bool, typer.Option("--count", help="Print the number of parameters, and write nothing")
    ] = False,
) -> None:
    """Make a native mixture of experts with random weights, to be pretrained.

    `chronicals moe new DIR --tokenizer MODEL --set hidden_size=512 --set num_experts=32` writes a
    model of class `ChronicalsMoeForCausalLM`; docs/moe.md names the sizes. `chronicals train
    --model DIR --objective pretraining` trains it.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from chronicals.config import ConfigurationError
    from chronicals.models import load_tokenizer
    from chronicals.models.loading import WEIGHT_DTYPES
    from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

    if dtype not in WEIGHT_DTYPES:
        raise ConfigurationError(f"dtype={dtype!r}: choose {', '.join(WEIGHT_DTYPES)}")
    if output.exists() and any(output.iterdir()):
        raise ConfigurationError(
            f"output={str(output)!r}: holds something already; name another folder"
        )
    words = load_tokenizer(tokenizer)
    ids = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    sizes = _sizes(values_of("set", set_ or []))
    try:
        config = ChronicalsMoeConfig(**{"vocab_size": len(words), **ids, **sizes})
    except StrictDataclassError as error:  # a field's type, or sizes that do not fit each other
        raise ConfigurationError(f"set: {error.__cause__ or error}") from None
    torch.manual_seed(seed)
    with torch.device("meta") if count else nullcontext():
        model = ChronicalsMoeForCausalLM(config).to(WEIGHT_DTYPES[dtype])
    if not count:
        model.save_pretrained(output)
        words.save_pretrained(output)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = total - experts + experts * config.num_experts_per_tok // config.num_experts
    print(f"{output}: {total:,} parameters, {active:,} of them for a token")  # noqa: T201


def _sizes(given: list[str]) -> dict[str, Any]:
    """Return values by name from ``NAME=VALUE`` texts; values are read as YAML.

    Raises:
        ConfigurationError: a text is not NAME=VALUE, or the model has no such size.
    """
    import dataclasses
    import difflib

    import yaml

    from chronicals.config import ConfigurationError
    from chronicals.moe import ChronicalsMoeConfig

    known = {field.name for field in dataclasses.fields(ChronicalsMoeConfig)}
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigurationError(f"set={text!r}: give NAME=VALUE, as num_experts=32")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigurationError(
                f"set={text!r}: there is no such size"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        found[name] = yaml.safe_load(value)
    return found


@moe_commands.command(cls=Command)
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
    base_model: BaseModel = None,
    load_in_4bit: In4Bits = False,
    offload_experts: OffloadExperts = False,
    expert_memory: ExpertMemory = None,
    expert_predictor: ExpertPredictor = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write down which experts a mixture's routers choose.

    `chronicals moe trace MODEL --data FILE --output DIR` runs the model over the data and writes
    for each token of each layer the chosen experts, their weights and the router's logits to
    `trace-*.npz`, and to `trace.json` what they are.
    """
    from chronicals.moe.lookahead.trace import record_trace

    recipe = recipe_for_reading(model, data, max_seq_length, batch_size, objective)
    place = placing(offload_experts, expert_memory, expert_predictor, output / "io.jsonl")
    loaded, tokenizer = loaded_mixture(model, base_model, load_in_4bit, trust_remote_code, place)
    info = record_trace(
        loaded, tokenizer, recipe.sources[0], recipe.config(), output, features, tokens, model
    )
    if offload_experts:
        print(loaded.offload.report())  # noqa: T201
        loaded.offload.close()
    size = f"{len(info.layers)} layers of {info.num_experts} experts, k={info.k}"
    print(f"{output}: {info.tokens:,} tokens, {size}")  # noqa: T201


def recipe_for_reading(
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
    model: str,
    base_model: str | None,
    load_in_4bit: bool,
    trust_remote_code: bool,
    place: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Load the model, onto the card if there is one, and its tokenizer.

    Args:
        model: model, adapter, checkpoint or folder of a run.
        base_model: base model of an adapter that does not name it.
        load_in_4bit: quantise the base.
        trust_remote_code: run code that comes with the model.
        place: brings the model to where it runs, in place of a card.

    Raises:
        ValueError: it cannot be loaded, or is no mixture of experts.
    """
    import torch

    from chronicals.generation import load_trained
    from chronicals.generation.answer import on_card
    from chronicals.moe.routers import mixture_layers
    from chronicals.saving import SavedModel

    def load(saved: SavedModel, dtype: torch.dtype, trusted: bool) -> Any:
        return saved.model(dtype, trusted, "nf4" if load_in_4bit else None)

    trained = load_trained(model, base_model, trust_remote_code, load, place or on_card)
    mixture_layers(trained.model)
    return trained.model, trained.tokenizer


@moe_commands.command(name="predict-train", cls=Command)
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
    base_model: BaseModel = None,
    load_in_4bit: In4Bits = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train heads that predict the experts of a frozen mixture.

    `chronicals moe predict-train MODEL --data FILE --output DIR` runs the model over the data,
    trains heads on what its routers do, measures on held-out data which share of the chosen experts
    they predict, and writes `predictor.safetensors` and `predictor.json`. With `--trace DIR` it
    reads what `chronicals moe trace MODEL --features` wrote, and the model does not run. The
    weights of the model are the same before and after, which is checked.
    """
    from chronicals.config import ConfigurationError
    from chronicals.moe.lookahead.distil_heads import HeadDistillation
    from chronicals.moe.lookahead.predictor import HeadSizes
    from chronicals.moe.lookahead.train_predictor import train_from_trace, train_predictor
    from chronicals.standard_json import to_json

    if (data is None) == (trace is None):
        raise ConfigurationError(
            f"data={data!r} and trace={str(trace) if trace else None!r}: give one of the two"
        )
    if trace is None and passes is not None:
        raise ConfigurationError(
            f"passes={passes}: the model runs over data once; leave it out, or record a trace and "
            "give it"
        )
    of_data = {"max_seq_length": max_seq_length, "batch_size": batch_size, "objective": objective}
    given = [name for name, value in of_data.items() if value is not None]
    if trace is not None and given:
        raise ConfigurationError(
            f"{given[0]}={of_data[given[0]]!r}: is for data, and a trace holds tokens; leave it out"
        )
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
        recipe = recipe_for_reading(model, data, *read)
        unseen = None if held_out is None else recipe_for_reading(model, held_out, *read).sources[0]
        loaded, tokenizer = loaded_mixture(model, base_model, load_in_4bit, trust_remote_code)
        found = train_predictor(
            loaded, tokenizer, recipe.sources[0], unseen, recipe.config(), sizes, how, *most
        )
    found.predictor.save(output, found.about())
    _show_recalls(found.recalls)
    print(to_json(found.about()))  # noqa: T201


def _show_recalls(recalls: Recalls) -> None:
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
