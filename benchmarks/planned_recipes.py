"""Writes docs/planned-recipes.md: recipes as `chronicals plan` has them beside those that a card ran.

    python benchmarks/planned_recipes.py [--only NAME] [--out docs/planned-recipes.md]

Of ``results/recipes-CARD.json``, which ``recipes_on_card.py`` wrote, every recipe is planned again, at
the rates that ``chronicals doctor --rates`` measured on that card (``results/rates-CARD.json``); some
minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from page_text import laid_out

from chronicals.cards import Rates
from chronicals.config import ChronicalsConfig, preset
from chronicals.models import quantise_layers
from chronicals.objectives import FrozenModel, build_objective
from chronicals.planning import Documents, Machines, Plan, plan
from chronicals.policies.frozen_models import Held
from chronicals.training.adapters import attach_adapters

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
MILLI = 1e3

MEMORY_BAR = 0.05
TIME_BAR = 0.10

INTRODUCTION = """\
# Planned and measured recipes

{count} recipes as `chronicals plan` has them beside what one {card} took: a few steps each, random weights of the true shapes,
random documents. The rates are those that `chronicals doctor --rates` measured on that card beforehand, in {rates_seconds} s.

Peaks, as `torch.cuda.max_memory_allocated` has them: {memory}

Steps, the median of those after the first four, and the tokens of a second: {time}

What is known of the data is given to the plan: the length of documents, and the share of positions that are targets. A plan
knows that documents are alike where each fills a pack: then one CUDA graph is captured, and gradients take turns with
activations.

This page is written by `python benchmarks/planned_recipes.py`.

| recipe | GiB measured | planned | off | at | ms measured | planned | off | tokens/s |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Compared:
    """A recipe that a card ran, and its plan.

    Attributes:
        name: of the recipe.
        result: what the card took, as ``recipes_on_card.py`` writes it.
        plan: of the same recipe; None for a model that cannot be planned without its file.
    """

    name: str
    result: dict[str, Any]
    plan: Plan | None

    @property
    def peak(self) -> float:
        """Measured bytes."""
        return float(self.result["peak"])

    @property
    def held(self) -> float:
        """Planned bytes, those of the run itself where there is no plan."""
        if self.plan is None:
            return float(self.result["planned"]["held"])
        return float(self.plan.held)

    @property
    def memory_error(self) -> float:
        """Difference of the planned peak from the measured one, as a ratio."""
        return self.held / self.peak - 1

    @property
    def timed(self) -> bool:
        """True if there is a plan, and steps were timed after those that capture graphs."""
        return self.plan is not None and len(self.result["step_seconds"]) > 1

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return statistics.median(self.result["step_seconds"])

    @property
    def time_error(self) -> float:
        """Difference of the planned step from the measured one, as a ratio."""
        assert self.plan is not None
        return self.plan.seconds / self.seconds - 1


def shape_on_meta(config_class: str, sizes: dict[str, Any]) -> Any:
    """Return a model without its weights."""
    config = getattr(transformers, config_class)(**sizes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def documents_of(result: dict[str, Any], config: ChronicalsConfig) -> Documents:
    """Return what is known of a recipe's data: lengths, and targets of its positions."""
    positions = sum(tokens / fill for tokens, fill in zip(result["tokens"], result["fill"]))
    labelled = min(sum(result["targets"]) / positions, 1.0)
    return Documents(result["mean_length"], labelled)


def planned(result: dict[str, Any], rates: Rates) -> Plan | None:
    """Return the plan of a recipe, on the card that it ran on."""
    if result["gguf"]:
        return None
    fields = dict(result["fields"])
    if "teacher" in result:
        fields["sections"] = {"distill": {"divergence": "jsd", "beta": 0.5, "teacher": "teacher"}}
    name = result["preset"]
    config = preset(name, **fields) if name else ChronicalsConfig(**fields)
    model = shape_on_meta(result["config_class"], result["sizes"])
    if config.quantization is not None:
        quantise_layers(model)
    attach_adapters(model, config, None)
    frozen = {}
    if "teacher" in result:
        teacher = shape_on_meta(**result["teacher"])
        declared = FrozenModel("teacher", "teacher", "bf16", "distill")
        frozen["teacher"] = Held.planned(declared, teacher)
    build_objective(config)
    memory = config.card_bytes or rates.memory
    machines = Machines(memory=memory, rates=rates)
    return plan(model, config, 1, machines, frozen, documents_of(result, config))


def compared(card: str, only: str = "") -> list[Compared]:
    """Return the recipes that a card ran, with their plans."""
    results = json.loads((RESULTS / f"recipes-{card}.json").read_text())
    measured = json.loads((RESULTS / f"rates-{card}.json").read_text())
    measured.pop("seconds")
    rates = Rates.from_dict(measured)
    found = []
    for name, result in results.items():
        if name != "machine" and "error" not in result and only in name:
            found.append(Compared(name, result, planned(result, rates)))
            print(line(found[-1]), end="", flush=True)
    return found


def line(one: Compared) -> str:
    """Return a line of the table."""
    moment = one.result["planned"]["moment"] if one.plan is None else one.plan.space.peak.name
    cells = [
        one.name,
        f"{one.peak / GIB:.2f}",
        f"{one.held / GIB:.2f}",
        f"{one.memory_error:+.1%}",
        moment,
    ]
    if one.timed:
        assert one.plan is not None
        cells += [
            f"{MILLI * one.seconds:.1f}",
            f"{MILLI * one.plan.seconds:.1f}",
            f"{one.time_error:+.1%}",
        ]
    else:
        cells += ["-", "-", "-"]
    cells.append(f"{one.result['tokens'][-1] / one.seconds:,.0f}")
    return f"| {' | '.join(cells)} |\n"


def summary(errors: list[float], bar: float) -> str:
    """Return how many errors are within the bar, the median and the largest."""
    sizes = sorted(abs(error) for error in errors)
    within = sum(size <= bar for size in sizes)
    return (
        f"{within} of {len(sizes)} within {bar:.0%}, the median {statistics.median(sizes):.1%}, "
        f"the largest {sizes[-1]:.1%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--card", default="h200")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "planned-recipes.md")
    parser.add_argument("--only", default="", help="part of the names; nothing is written")
    given = parser.parse_args()
    found = compared(given.card, given.only)
    memory = summary([one.memory_error for one in found], MEMORY_BAR)
    time = summary([one.time_error for one in found if one.timed], TIME_BAR)
    print(memory, time, sep="\n")
    if not given.only:
        results = json.loads((RESULTS / f"recipes-{given.card}.json").read_text())
        rates = json.loads((RESULTS / f"rates-{given.card}.json").read_text())
        text = INTRODUCTION.format(
            count=len(found),
            card=results["machine"]["card"],
            rates_seconds=round(rates["seconds"]),
            memory=memory,
            time=time,
        )
        given.out.write_text(laid_out(text + "".join(line(one) for one in found)))


if __name__ == "__main__":
    main()
