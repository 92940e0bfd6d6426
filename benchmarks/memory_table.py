"""Compares the memory that plans predict with that of the recorded rows, for `plan_table.py`.

Every arm of ours in ``results/row-*.json`` that was measured is planned again from its fields: the
model on the meta device, one card of the size that it had, FlashAttention-4. Peaks are those of
``torch.cuda.max_memory_allocated`` over whole runs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from measured_rows import FIELD, MEASURED_ROW

from chronicals.benchmark.shapes import SHAPES
from chronicals.config import ChronicalsConfig
from chronicals.memory import Moment
from chronicals.models import quantise_layers
from chronicals.objectives import FrozenModel
from chronicals.policies import Facts, fit_to_memory
from chronicals.policies.frozen_models import Held
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.solver import settle_sharding
from chronicals.training.adapters import attach_adapters

GIB = 2**30

INTRODUCTION = """\

## Memory beside what was measured

The most bytes that tensors held, in GiB, of every recorded row of ours: as a plan predicts it, and as a card measured it
(`torch.cuda.max_memory_allocated`). Of {count} arms the median error is {median:.1%}, the largest {largest:.1%}.

Documents of a row called *fixed* all have one length, so that one CUDA graph is captured and gradients take turns with
activations. A plan does not read data and expects several graphs, whose gradients stay: it is higher there by the bytes of the
gradients. Of pairs, keys and values of shared prompts are counted once.

| row | changed | measured | planned | error | at |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Compared:
    """An arm of ours, planned and measured.

    Attributes:
        row: name of its row, with the card.
        changes: fields of the arm that the row does not have.
        measured: peak in GiB.
        planned: largest moment that is expected.
    """

    row: str
    changes: str
    measured: float
    planned: Moment

    @property
    def error(self) -> float:
        """Difference of the planned peak from the measured one, as a ratio."""
        return self.planned.held / GIB / self.measured - 1


def shape_on_meta(name: str) -> Any:
    """Return a built-in model without its weights."""
    shape = SHAPES[name]
    config = getattr(transformers, shape.config_class)(**shape.sizes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def fields_of(row: dict, arm: str) -> dict[str, Any]:
    """Return the fields of an arm's configuration, from its row's and its name."""
    fields = dict(row["fields"])
    for name, value in FIELD.findall(arm):
        fields[name] = yaml.safe_load(value)
    if fields.get("max_grad_norm") == "inf":
        fields["max_grad_norm"] = math.inf
    return fields


def planned(row: dict, arm: str, total: int) -> Moment:
    """Return the largest moment that a plan of an arm expects.

    Args:
        row: the row's description, as its file has it.
        arm: name of the arm.
        total: bytes of its card.
    """
    config = ChronicalsConfig(**fields_of(row, arm))
    model = shape_on_meta(row["model"])
    if config.quantization is not None:
        quantise_layers(model)
    attach_adapters(model, config, None)
    frozen = {}
    if "teacher" in row:
        declared = FrozenModel("teacher", row["teacher"], "bf16", "distill")
        frozen["teacher"] = Held.planned(declared, shape_on_meta(row["teacher"]))
    facts = Facts(
        config,
        model,
        total=total,
        backend="flash-attn-4",
        frozen_models=frozen,
        alike=row["data"] == "fixed",
    )
    facts, sharding = settle_sharding(facts)
    return fit_to_memory(facts, sharding, expected_memory(facts)[1]).peak


def compared(results: Path) -> Iterator[Compared]:
    """Yield every measured arm of ours in a folder of results."""
    for file in sorted(results.glob("row-*.json")):
        result = json.loads(file.read_text())
        if MEASURED_ROW.fullmatch(file.name) is None or "arms" not in result:
            continue
        total = int(result["machine"]["memory_gib"] * GIB)
        for name, arm in result["arms"].items():
            if name.split()[0] == "ours" and arm.get("status") == "measured":
                moment = planned(result["row"], name, total)
                changes = name.removeprefix("ours").strip()
                title = file.stem.removeprefix("row-")
                yield Compared(title, changes, arm["peak_gib"], moment)


def section(rows: list[Compared]) -> str:
    """Return the section of the page."""
    errors = [abs(row.error) for row in rows]
    lines = [
        f"| {row.row} | {row.changes or '-'} | {row.measured:.2f} | {row.planned.held / GIB:.2f} | "
        f"{row.error:+.1%} | {row.planned.name} |\n"
        for row in rows
    ]
    head = INTRODUCTION.format(
        count=len(rows), median=statistics.median(errors), largest=max(errors)
    )
    return head + "".join(lines)
