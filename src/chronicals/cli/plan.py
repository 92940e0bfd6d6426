"""``chronicals plan``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import AsJson, PresetName
from chronicals.cli.options import (
    make_room_for,
    values_of,
    with_known_names,
    with_recipe_flags,
)
from chronicals.cli.space_table import show_space
from chronicals.cli.wording import in_users_form
from chronicals.standard_json import to_json

if TYPE_CHECKING:
    from rich.console import Console

    from chronicals.planning import Machines, Plan

GIGA = 1e9

MOST_CARDS = 1_000_000
"""Cards of the largest plan: the sums of a step are run among as many processes that are not there."""

TABLE_COLUMNS = 120
"""Terminal columns that the table needs."""


@with_recipe_flags
def plan_command(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML file with any of the fields below, as for train")
    ] = None,
    gpus: Annotated[list[str], typer.Option(help="Card counts, with commas or repeated")] = ["1"],  # noqa: B006
    card: Annotated[
        str | None,
        typer.Option(
            help="Card whose rates are taken, as H200 or 'A100 80GB' (default: the one here)"
        ),
    ] = None,
    cards: Annotated[int, typer.Option(min=1, help="Cards of a machine")] = 8,
    link: Annotated[
        float, typer.Option(min=0.001, help="GB/s that a card sends within its machine")
    ] = 370.0,
    network: Annotated[
        float, typer.Option(min=0.001, help="GB/s that a card sends between machines")
    ] = 46.0,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="TFLOP/s that a card reaches in training, for the time instead of its rates",
        ),
    ] = None,
    document_length: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens of a document (default: as many as a pack has)"),
    ] = None,
    labelled: Annotated[
        float, typer.Option(min=0.001, max=1, help="Share of the tokens that are targets")
    ] = 1.0,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the recipe, with the settings that --fit took, for the first of --gpus"
        ),
    ] = None,
    preset: PresetName = None,
    **flags: Any,
) -> None:
    """Count what a run takes, without a card.

    `chronicals plan recipe.yaml` takes what `train` takes; data are not read, and of the models
    their configurations alone. For one card it prints by part what the card holds at the largest
    moment of a step, and what is in host memory and on the disk; and the time of a step by part, at
    the rates of a card (`--card`; `chronicals doctor --rates` measures those of this machine's).
    `--preset long-context --gpu-memory 80` plans the longest document that fits.

    With `--gpus 8,64,1024` it prints for each number of cards what a card holds at most, and
    whether that fits; the bytes that it sends in an optimizer step, counted by running the sums and
    updates of training among processes that are not there; and the time that this adds to the
    computation.
    """
    from chronicals.config import ConfigurationError, Recipe
    from chronicals.config.presets import AUTO_PRESET, LONG_PRESET

    make_room_for(output)
    for name, value in {"link": link, "network": network, "tflops": tflops}.items():
        if value is not None and not math.isfinite(value):
            raise ConfigurationError(
                f"{name}={value}: must be a finite number; give a rate, as 370"
            )
    in_file = {} if recipe is None else Recipe.read_yaml(recipe)
    unread: dict[str, Any] = {"data": ["not read"]}
    if "data" in {**in_file, **flags}:
        unread = {}
    given = with_known_names(Recipe.given(preset, recipe, **unread, **flags))

    from chronicals.objectives import build_objective
    from chronicals.planning import (
        Documents,
        Machines,
        asked_rates,
        plan,
        planned_frozen,
        planned_model,
        rates_here,
    )
    from chronicals.planning.longest import longest_document
    from chronicals.planning.ways import card_here, with_way

    counts = _counts(gpus)
    if preset == AUTO_PRESET:
        given = with_way(given, given.config().card_bytes or card_here(), counts[0])
    rates, whose, memory = rates_here() if card is None else asked_rates(card)
    longest = None
    if preset == LONG_PRESET and "max_seq_length" not in {**in_file, **flags}:
        given = given.replace(fit="settings")
        longest = longest_document(given, given.config().card_bytes or memory, counts[0])
        given = given.replace(max_seq_length=longest)
    config = given.config()
    if document_length is not None and document_length > config.max_seq_length:
        raise ConfigurationError(
            f"document_length={document_length:g}: is longer than a pack; give at most "
            f"max_seq_length={config.max_seq_length}"
        )
    objective = build_objective(config)
    uncounted = objective.unplanned_costs(config)
    machines = Machines(
        memory=config.card_bytes or memory,
        cards=cards,
        link=link * GIGA,
        network=network * GIGA,
        rates=rates,
        flops=None if tflops is None else tflops * 1e12,
    )
    documents = Documents(document_length, labelled)
    model = planned_model(given, config)
    frozen = planned_frozen(objective, config)
    plans = [plan(model, config, count, machines, frozen, documents) for count in counts]
    if output is not None:
        given.replace(**plans[0].settings).to_yaml(output, ("fit", "gpu_memory", *unread))
    if as_json:
        print(to_json([one.to_dict() for one in plans], indent=2))  # noqa: T201
    else:
        _show_plans(plans, machines, whose, uncounted)
    if longest is not None and not as_json:
        typer.echo(
            f"The longest document that fits has {longest:,} tokens (max_seq_length={longest}); a "
            f"step of {config.gradient_accumulation_steps} takes {plans[0].seconds:,.1f} s."
        )


def _counts(texts: Sequence[str]) -> list[int]:
    """Return the numbers of cards of ``--gpus``."""
    from chronicals.config import ConfigurationError

    parts = values_of("gpus", texts)
    if not all(part.isdecimal() and 0 < int(part) <= MOST_CARDS for part in parts):
        raise ConfigurationError(
            f"gpus={','.join(texts)!r}: give numbers of cards up to {MOST_CARDS:,}, with commas "
            "between several, as 8,64"
        )
    return [int(part) for part in parts]


def _show_plans(plans: list[Plan], machines: Machines, whose: str, uncounted: str | None) -> None:
    """Print the table, the time of a step by part, and their assumptions below them.

    Args:
        plans: one for each number of cards.
        machines: what they assume.
        whose: why these rates are taken, in words.
        uncounted: passes of the objective that are not in the time, in words.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, TABLE_COLUMNS))
    if len(plans) == 1 and plans[0].gpus == 1:
        show_space(plans[0].space, console)
    some_stay = any(one.stay for one in plans)
    layers = ("layers again", "layers stay") if some_stay else ("layers again",)
    times = ("computing", "waiting", "slowed", "efficiency", "tokens/s")
    table = Table("cards", "GB held", *layers, "GB sent", *times, box=box.SIMPLE)
    for one in plans:
        counts = (one.recomputed, one.stay) if some_stay else (one.recomputed,)
        table.add_row(
            f"{one.gpus:,}",
            f"{one.held / GIGA:.1f}" + ("" if one.fits else " [bold red]too much[/]"),
            *(f"{count}" if count else "-" for count in counts),
            f"{one.sent.total / GIGA:.2f}",
            f"{one.computing:.3f} s",
            f"{one.exposed:.3f} s",
            f"{one.slowed:.3f} s",
            f"{one.efficiency:.0%}",
            _between(one),
        )
    console.print(table)
    _show_parts(console, plans[0], machines, whose)
    divided = ", ".join(
        f"{one.gpus:,}" for one in plans if one.sharding == "weights" and one.gpus > 1
    )
    beside = f", but divided where there are {divided}" if divided else ""
    reached = f", {machines.flops / 1e12:g} TFLOP/s reached" if machines.flops else ""
    console.print(
        f"Cards of {machines.memory / GIGA:g} GB, {machines.cards} a machine, "
        f"{machines.link / GIGA:g} GB/s within one and "
        f"{machines.network / GIGA:g} between machines{reached}; "
        f"weights are on every card{beside}.",
        soft_wrap=True,
    )
    if uncounted is not None:
        console.print(
            f"Not in the time: {uncounted}.", soft_wrap=True, markup=False, highlight=False
        )
    for one in plans:
        for line in one.words:
            text = in_users_form(f"{one.gpus} x {line}")
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    if some_stay:
        console.print(
            "Layers that stay are gathered once for both of their passes, for memory is spare.",
            soft_wrap=True,
        )


def _between(one: Plan) -> str:
    """Return the tokens of a second as an interval, or as a number where a single rate was given."""
    shortest, longest = one.interval
    if one.time is None:
        return f"{one.tokens_per_second:,.0f}"
    return f"{one.tokens / longest:,.0f} to {one.tokens / shortest:,.0f}"


def _show_parts(console: Console, one: Plan, machines: Machines, whose: str) -> None:
    """Print the seconds of the computation by part, and where the rates come from."""
    if one.time is None:
        return
    total = one.time.seconds
    parts = ", ".join(
        f"{name} {seconds:.4g} s ({seconds / total:.0%})"
        for name, seconds in one.time.parts.items()
        if seconds >= total / 1000
    )
    console.print(f"Computing: {parts}.", soft_wrap=True, highlight=False)
    rates = machines.rates
    console.print(
        f"Rates of {rates.card} ({whose}), {rates.source}: {rates.origin}; a time may be "
        f"{rates.margin:.0%} off.",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
