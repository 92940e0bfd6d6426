"""Compares the time of a step as `chronicals plan` has it with the measured one.

    python benchmarks/plan_times.py [--out docs/planned-times.md]

The arms of ours in ``results/row-*.json``; some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from measured_rows import MEASURED_ROW, RESULTS, fields

from chronicals.benchmark.shapes import SHAPES
from chronicals.config import ChronicalsConfig
from chronicals.models import quantise_layers
from chronicals.planning import Machines, Plan, plan
from chronicals.planning.rates import rates_of
from chronicals.training.adapters import attach_adapters


def arms() -> Iterator[tuple[str, str, dict[str, Any], float, str]]:
    """Yield file, model, fields, seconds of a step and card of each measured arm of ours."""
    for path in sorted(RESULTS.glob("row-*.json")):
        result = json.loads(path.read_text())
        row = result["row"]
        name = MEASURED_ROW.fullmatch(path.name)["row"]
        for title, arm in result["arms"].items():
            if title.startswith("ours") and arm["status"] == "measured":
                changes = {key: value_of(value) for key, value in fields(title).items()}
                tokens = arm.get("tokens_a_step") or row["tokens_a_step"]
                seconds = tokens / arm["tokens_per_second"]["median"]
                yield (
                    f"{name} {title.removeprefix('ours').strip()}".strip(),
                    row["model"],
                    {**row["fields"], **changes},
                    seconds,
                    result["machine"]["card"],
                )


def value_of(text: str) -> Any:
    """The value of a field in the title of an arm."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text.split(", ") if "," in text else text


def planned(model: str, values: dict[str, Any], card: str) -> Plan:
    """Return the plan of a row on one card."""
    if isinstance(values.get("memory"), str):
        values["memory"] = [values["memory"]]
    config = ChronicalsConfig(**{"use_lora": False, **values})
    built_in = SHAPES[model]
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, built_in.config_class)(**built_in.sizes), dtype=torch.bfloat16
        )
    if config.quantization:
        quantise_layers(made)
    attach_adapters(made, config, None)
    rates = rates_of(card)
    return plan(made, config, 1, Machines(memory=rates.memory, rates=rates))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    for name, model, values, seconds, card in arms():
        if given.only not in name:
            continue
        try:
            one = planned(model, values, card)
        except Exception as error:
            print(f"{name:70} {type(error).__name__}: {str(error)[:100]}")
            continue
        parts = " ".join(f"{1e3 * s:.1f}" for s in one.time.parts.values())
        off = one.seconds / seconds - 1
        print(f"{name[:90]:90} {1e3 * seconds:7.1f} {1e3 * one.seconds:7.1f} {off:+.1%}  {parts}")


if __name__ == "__main__":
    main()
