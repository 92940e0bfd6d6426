"""Plans the presets of a way and a card for models of seven sizes, and writes `docs/presets.md`.

    python benchmarks/preset_table.py [--sizes 0.5B,8B] [--ways qlora] [--cards 16,24]
    python benchmarks/preset_table.py --page     # writes the page again from the results
    python benchmarks/preset_table.py --trained  # the presets that a card trained, and the page

A second or a few a row on a CPU, some minutes for all. Nothing is trained: a row is a plan, on a
model without memory, with the settings that ``fit`` takes on such a card. Each is written to
``results/preset-table.json`` as it comes, in the place of an earlier one. A card on which no settings
fit has no tokens/s; what would do stands there instead.

Of ``results/presets-h200.json``, which ``recipes_on_card.py --presets`` writes on an H200, what each
preset held and its tokens/s stand beside its plan with the settings that it took, at the H200's rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from page_text import laid_out
from planned_recipes import planned as plan_of_result
from torch.nn import Parameter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from chronicals.benchmark.record import current_commit, versions
from chronicals.cards import Rates, rates_of
from chronicals.config import preset
from chronicals.config.presets import CARDS, WAYS
from chronicals.models import quantise_layers
from chronicals.objectives import build_objective
from chronicals.planning import Machines, Plan, plan, planned_frozen
from chronicals.standard_json import to_json
from chronicals.training.adapters import attach_adapters

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "preset-table.json"
TRAINED = ROOT / "benchmarks" / "results" / "presets-h200.json"
RATES_OF_CARD = ROOT / "benchmarks" / "results" / "rates-h200.json"
PAGE = ROOT / "docs" / "presets.md"

GIGA = 10**9

SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
"""Width, inner width, layers, query heads, key heads and vocabulary: those of Qwen2.5 and Llama 3."""

TIED = ("0.5B", "1.5B", "3B")
"""Sizes whose embedding is the head, too."""

OBJECTIVES = ("sft", "dpo")

RATES = {
    8: "RTX 3090",
    12: "RTX 3090",
    16: "RTX 3090",
    24: "RTX 4090",
    48: "L40S",
    80: "H100",
    141: "H200",
}
"""Card whose rates are taken, by GB. Of smaller cards that train in bf16 no data sheet is known."""

INTRODUCTION = """\
# What the presets take

`--preset WAY-SIZEgb` is a way to train and a card: `full-80gb`, `lora-24gb`, `qlora-16gb`
([memory](memory.md#settings-taken-for-you)). The size of the model is read from the model, and the settings that fit the card
are taken before the first step. These are the plans of all of them, for models with the shapes of Qwen2.5 and Llama 3, and
packs of 2,048 tokens. {trained}: memory and time are those that `chronicals plan` tells, with its errors
([planning](planning.md#memory-beside-what-was-measured), [times](planned-times.md)).

Tokens of a second are the lower and the upper end of the plan's interval, at the rates of {cards}. Plans know no data sheet
of a card of 8 to 16 GB that trains in bf16, and such a card is slower than the one whose rates stand there.

What fits is what a run takes by itself: at most 90 % of the card. Where no settings fit, the smallest card, or the number of
cards, stands there that would do.

This page is written by `python benchmarks/preset_table.py`, from `benchmarks/results/preset-table.json` ({date}).
"""

NONE_TRAINED = "No row was trained"
SOME_TRAINED = "The rows of both tables were not trained, but those of the last one were"

TRAINED_SECTION = """
## Trained on an H200

Presets, each with the allocator capped at what its card has beside the driver: three steps or more, of random weights and
documents (`python benchmarks/recipes_on_card.py OUT.json --presets`). Bytes are those of tensors. Tokens of a second are
the H200's, of the last steps, beside the plan of the settings that were taken, at the H200's rates. Where steps are
graphs (cards of up to 16 GB, models of up to 3B), these few steps capture most of them and take longer than those that follow.

| preset | GB held | planned | off | tokens a second | planned | settings |
|---|---|---|---|---|---|---|
"""

TITLES = {"sft": "Supervised fine-tuning", "dpo": "Preferences (DPO)"}


def planned(size: str, way: str, card: int, objective: str) -> Plan:
    """Return the plan of a preset for a model of a size."""
    config = preset(f"{way}-{card}gb", objective=objective)
    width, inner, layers, heads, keys, vocabulary = SIZES[size]
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=keys,
                vocab_size=vocabulary,
                tie_word_embeddings=size in TIED,
            )
        )
    if config.quantization:
        quantise_layers(model)
    attach_adapters(model, config, None)
    hold_lists(model)
    frozen = planned_frozen(build_objective(config), config)
    machines = Machines(memory=card * GIGA, rates=rates_of(RATES[card]))
    return plan(model, config, 1, machines, frozen)


def hold_lists(model: torch.nn.Module) -> None:
    """Let a model that does not change any more list its parameters and modules only once.

    Every combination of settings asks for them, and half of a row's time is their search.
    """
    for each in list(model.modules()):
        if each is model or isinstance(each, LlamaDecoderLayer):
            each.parameters = partial(listed, tuple(each.parameters()), each.parameters)
            each.modules = partial(iter, tuple(each.modules()))


def listed(
    items: tuple[Parameter, ...], search: Callable[..., Iterator[Parameter]], recurse: bool = True
) -> Iterator[Parameter]:
    """Return all parameters of a module; those of it alone are searched for."""
    return iter(items) if recurse else search(recurse=False)


def found(size: str, way: str, card: int, objective: str) -> dict[str, Any]:
    """Return the row of a preset as plain values."""
    one = planned(size, way, card, objective)
    enough = [words for words in one.words if words.endswith(" would do")]
    shortest, longest = one.interval
    return {
        "model": size,
        "way": way,
        "card": card,
        "objective": objective,
        "rates": RATES[card],
        "fits": not enough,
        "held": one.held,
        "tokens_a_second": [one.tokens / longest, one.tokens / shortest],
        "settings": one.settings,
        "recomputed": one.recomputed,
        "enough": enough[0].removeprefix("fit: ").removesuffix(" would do") if enough else "",
    }


def trained(result: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Return what a preset took on a card beside its plan, or how it ended.

    Args:
        result: as ``recipes_on_card.py`` writes it.
        rates: of the card.
    """
    if "error" in result:
        return {"error": result["error"].partition(". ")[0]}
    taken = result["taken"]
    fields = {**result["fields"], **taken, "fit": "off"}
    one = plan_of_result({**result, "fields": fields}, rates)
    assert one is not None
    shortest, longest = one.interval
    return {
        "peak": result["peak"],
        "held": result["planned"]["held"],
        "tokens_a_second": result["tokens"][-1] / statistics.median(result["step_seconds"]),
        "planned": [one.tokens / longest, one.tokens / shortest],
        "settings": taken,
        "error": "",
    }


def compare_trained() -> dict[str, dict[str, Any]]:
    """Return the presets that the H200 trained beside their plans, by name; none without results."""
    if not TRAINED.exists():
        return {}
    measured = json.loads(RATES_OF_CARD.read_text())
    measured.pop("seconds")
    rates = Rates.from_dict(measured)
    results = json.loads(TRAINED.read_text())
    return {name: trained(each, rates) for name, each in results.items() if name != "machine"}


def key(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the place of a row in the tables."""
    places = OBJECTIVES.index(row["objective"]), list(SIZES).index(row["model"])
    return (*places, list(WAYS).index(row["way"]), row["card"])


def measure(objectives: list[str], sizes: list[str], ways: list[str], cards: list[int]) -> None:
    """Plan each preset and size, and write it to the results."""
    made = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    rows = {key(row): row for row in made["rows"]}
    for objective in objectives:
        for size in sizes:
            for way in ways:
                for card in cards:
                    row = found(size, way, card, objective)
                    rows[key(row)] = row
                    write(rows, made.get("trained", {}))
                    print(cells(row), flush=True)


def write(
    rows: dict[tuple[int, int, int, int], dict[str, Any]], trained: dict[str, dict[str, Any]]
) -> None:
    """Write the results so far."""
    made = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": current_commit(),
        "versions": versions(),
        "rows": [rows[place] for place in sorted(rows)],
        "trained": trained,
    }
    RESULTS.write_text(to_json(made, indent=1))


def speed(row: dict[str, Any]) -> str:
    """Return the tokens of a second in words; "-" where the run does not fit."""
    slowest, fastest = row["tokens_a_second"]
    return f"{slowest:,.0f} to {fastest:,.0f}" if row["fits"] else "-"


def cells(row: dict[str, Any]) -> str:
    """Return the row of a table with its settings, or with what would do."""
    settings = ", ".join(f"`{name}={value}`" for name, value in row["settings"].items())
    if row["recomputed"]:
        layers = f"{row['recomputed']} layers recomputed"
        settings = f"{settings}, {layers}" if settings else layers
    words = settings or "as they are"
    if not row["fits"]:
        words = f"none fit; {row['enough']}"
    held = f"{row['held'] / GIGA:.1f}"
    return f"| {row['model']} | {row['way']} | {row['card']} | {held} | {speed(row)} | {words} |"


def trained_cells(name: str, one: dict[str, Any]) -> str:
    """Return the row of a preset that was trained."""
    if one["error"]:
        return f"| {name} | - | - | - | - | - | {one['error']} |"
    settings = ", ".join(f"`{field}={value}`" for field, value in one["settings"].items())
    slowest, fastest = one["planned"]
    cells = [
        name,
        f"{one['peak'] / GIGA:.2f}",
        f"{one['held'] / GIGA:.2f}",
        f"{one['held'] / one['peak'] - 1:+.1%}",
        f"{one['tokens_a_second']:,.0f}",
        f"{slowest:,.0f} to {fastest:,.0f}",
        settings,
    ]
    return f"| {' | '.join(cells)} |"


def page(made: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the page."""
    sizes: dict[str, list[str]] = {}
    for size, name in RATES.items():
        sizes.setdefault(name, []).append(str(size))
    cards = ", ".join(f"{name} for {' and '.join(of)} GB" for name, of in sizes.items())
    were_trained = SOME_TRAINED if made.get("trained") else NONE_TRAINED
    date = made["date"].partition("T")[0]
    yield INTRODUCTION.format(cards=cards, date=date, trained=were_trained)
    for objective in OBJECTIVES:
        rows = [row for row in made["rows"] if row["objective"] == objective]
        yield f"\n## {TITLES[objective]}\n\n"
        yield "| model | way | GB of the card | GB held | tokens a second | settings |\n"
        yield "|---|---|---|---|---|---|\n"
        for row in rows:
            yield cells(row) + "\n"
    if made.get("trained"):
        yield TRAINED_SECTION
    for name, one in made.get("trained", {}).items():
        yield trained_cells(name, one) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--cards", default=",".join(map(str, CARDS)))
    parser.add_argument("--page", action="store_true", help="plan nothing")
    parser.add_argument("--trained", action="store_true", help="only compare what was trained")
    given = parser.parse_args()
    if given.trained:
        made = json.loads(RESULTS.read_text())
        write({key(row): row for row in made["rows"]}, compare_trained())
    elif not given.page:
        cards = [int(card) for card in given.cards.split(",")]
        objectives = given.objectives.split(",")
        measure(objectives, given.sizes.split(","), given.ways.split(","), cards)
    PAGE.write_text(laid_out("".join(page(json.loads(RESULTS.read_text())))))


if __name__ == "__main__":
    main()
