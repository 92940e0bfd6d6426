"""Writes docs/planned-times.md: steps as `chronicals plan` has them beside the measured ones.

    python benchmarks/plan_times.py [--out docs/planned-times.md] [--only NAME]

Our arms of ``results/row-*.json``, on the card that each ran on; some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from measured_rows import MEASURED_ROW, RESULTS, fields
from page_text import laid_out

from chronicals.benchmark.shapes import SHAPES
from chronicals.config import ChronicalsConfig
from chronicals.models import quantise_layers
from chronicals.objectives import build_objective
from chronicals.planning import Documents, Machines, Plan, plan, rates_of
from chronicals.policies import Decision, Facts
from chronicals.policies.frozen_models import Held
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.recompute_layers import RECOMPUTE_LAYERS
from chronicals.policies.sharding import SHARDING
from chronicals.policies.solver import Fitted, work_of
from chronicals.training.adapters import attach_adapters

ROOT = Path(__file__).parent.parent
MILLI = 1e3

INTRODUCTION = """\
# Planned and measured steps

Steps as `chronicals plan` has them (`{command}`) beside the measured ones, on one card, at its rates; what is known of
the data, the length of documents and the share of targets, is given. Of pairs of answers a plan has the positions of the packs,
so prompts that answers share count once, as they are computed.

{summary}

OLMoE is planned with the 11 of 16 layers that its run recomputed, which a run of today would not. Short steps of pairs
wait for the host, which reads the lengths of documents, up to a tenth of their time (profiles in the records). A
teacher's divergence takes 27 ms of exponentials, and its bytes 3. Routing costs more than the bytes of its rows.

The rates of the H100 are those of records, taken in its rows that train documents: these show that a step is the sum of
its parts, and what is in them. Those of the H200 were measured by themselves (`chronicals doctor --rates`), so its rows
show how well a card is met. Data sheets were compared with no measurement.

This page is written by `python benchmarks/plan_times.py`. Milliseconds of a step:

| row | card | measured | planned | off | products | attention | elementwise | loss | optimizer | copies | launches |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


RECOMPUTED = {"olmoe-1b-7b-full-fixed": 11}
"""Layers that a recorded run recomputed and a run of today would not, by its profile: that of OLMoE
has 86 products of experts a step, 22 more than its 16 layers take. It expected all gradients beside
the activations of its first graph.
"""


@dataclass(frozen=True)
class Arm:
    """A measured arm of ours.

    Attributes:
        row: name of its row, and the fields in which it differs from that.
        model: built-in shape.
        fields: of its configuration.
        card: that it ran on.
        seconds: of a step, the median.
        documents: of its data.
    """

    row: str
    model: str
    fields: dict[str, Any]
    card: str
    seconds: float
    documents: Documents


def arms() -> Iterator[Arm]:
    """All measured arms of ours, in the order of the files."""
    for path in sorted(RESULTS.glob("row-*.json")):
        result = json.loads(path.read_text())
        row = result["row"]
        parts = MEASURED_ROW.fullmatch(path.name)
        assert parts is not None
        for title, arm in result["arms"].items():
            if not title.startswith("ours") or arm["status"] != "measured":
                continue
            changes = {name: value_of(name, text) for name, text in fields(title).items()}
            tokens = arm.get("tokens_a_step") or row["tokens_a_step"]
            # of pairs, tokens of shared prompts count for both answers, and are computed once
            positions = arm.get("positions_a_step") or tokens
            yield Arm(
                f"{parts['row']}{title.removeprefix('ours')}",
                row["model"],
                {**row["fields"], **changes},
                result["machine"]["card"],
                tokens / arm["tokens_per_second"]["median"],
                Documents(row["mean_length"], min(row["labelled"] * tokens / positions, 1.0)),
            )


def value_of(name: str, text: str) -> Any:
    """The value of a field as it stands in the title of an arm."""
    if name == "memory":
        return text.split(", ")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def planned(arm: Arm) -> Plan:
    """The plan of an arm on its card."""
    config = ChronicalsConfig(**{"use_lora": False, **arm.fields})
    model = without_weights(arm.model)
    if config.quantization:
        quantise_layers(model)
    attach_adapters(model, config, None)
    frozen = {
        each.name: Held.planned(each, without_weights(Path(each.place).name))
        for each in build_objective(config).frozen_models(config)
    }
    rates = rates_of(arm.card)
    machines = Machines(memory=rates.memory, rates=rates)
    made = plan(model, config, 1, machines, frozen, arm.documents)
    if arm.row not in RECOMPUTED:
        return made
    facts = Facts(config, model, total=rates.memory)
    frees, memory = expected_memory(facts)
    recomputed = Decision(RECOMPUTE_LAYERS.name, True, "recorded", layers=RECOMPUTED[arm.row])
    fitted = Fitted(memory, recomputed, Decision(SHARDING.name, False, "one process"))
    time = work_of(facts, frees, fitted, ModelSizes.of(model), arm.documents).at(rates)
    return replace(made, time=time, computing=time.seconds)


def without_weights(name: str) -> Any:
    """A built-in shape on the meta device."""
    built_in = SHAPES[name]
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, built_in.config_class)(**built_in.sizes), dtype=torch.bfloat16
        )


def line(arm: Arm, one: Plan) -> str:
    """A line of the table, in milliseconds."""
    assert one.time is not None
    parts = (f"{MILLI * seconds:.1f}" for seconds in one.time.parts.values())
    cells = (
        arm.row,
        arm.card.split()[1],
        f"{MILLI * arm.seconds:.1f}",
        f"{MILLI * one.seconds:.1f}",
        f"{one.seconds / arm.seconds - 1:+.1%}",
        *parts,
    )
    return f"| {' | '.join(cells)} |\n"


def summary(errors: list[float]) -> str:
    """How many are how near."""
    sizes = sorted(abs(error) for error in errors)
    return (
        f"Of {len(sizes)} steps {sum(size <= 0.05 for size in sizes)} are within 5 %, "
        f"{sum(size <= 0.1 for size in sizes)} within 10 %; the median is "
        f"{sizes[len(sizes) // 2]:.1%}, the largest {sizes[-1]:.1%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "planned-times.md")
    parser.add_argument("--only", default="", help="part of the rows' names; nothing is written")
    given = parser.parse_args()
    lines = []
    errors = []
    for arm in arms():
        if given.only in arm.row:
            one = planned(arm)
            lines.append(line(arm, one))
            errors.append(one.seconds / arm.seconds - 1)
            print(lines[-1], end="", flush=True)
    print(summary(errors))
    if not given.only:
        command = "chronicals plan --card CARD --document-length … --labelled …"
        text = INTRODUCTION.format(command=command, summary=summary(errors))
        given.out.write_text(laid_out(text + "".join(lines)))


if __name__ == "__main__":
    main()
