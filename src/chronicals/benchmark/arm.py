"""One arm in a process of its own.

It is started by ``python -m chronicals.benchmark.arm WORK_FOLDER NAME --steps N --out FILE``. The
name is ``ours``, ``reference`` or ``prepare``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OWN_ARMS = {
    "documents": {
        "ours": "chronicals.benchmark.arms.ours:ours",
        "reference": "chronicals.benchmark.arms.reference:train_reference",
    },
    "pairs": {
        "ours": "chronicals.benchmark.arms.ours:ours",
        "reference": "chronicals.benchmark.arms.pair_reference:train_pair_reference",
    },
    "distillation": {
        "ours": "chronicals.benchmark.arms.ours:ours",
        "reference": "chronicals.benchmark.arms.reference:train_distillation_reference",
    },
}
"""Module and function of each arm, by the kind of the work."""


def run_named_arm(arguments: list[str] | None = None) -> None:
    """Run the arm that the command line names, or prepare the work.

    Preparing writes the work's files, and the machine's rates to ``--out``. If the rates cannot be
    measured, that file has the error: a row without a reference step is still a row.
    """
    began = time.perf_counter()
    names = [*OWN_ARMS["documents"], "prepare"]
    chosen = arm_parser("chronicals.benchmark.arm", names).parse_args(arguments)
    if chosen.name != "prepare":
        run_arm(chosen, OWN_ARMS, began)
        return
    from chronicals.benchmark.arms.weights import prepare_work
    from chronicals.benchmark.plan import read_work
    from chronicals.benchmark.rates import described_machine, measure_rates

    work = read_work(chosen.work)
    prepare_work(work)
    rates: dict[str, Any]
    if work.kind != "documents":
        rates = {"machine": described_machine()}
    else:
        try:
            rates = measure_rates(work)
        except Exception as error:
            rates = {"error": f"{type(error).__name__}: {error}"}
    chosen.out.write_text(json.dumps(rates))


def arm_parser(module: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of an arm's process."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("work", type=Path)
    parser.add_argument("name", choices=names)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path, help="profile a few steps more, into this file")
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="fields of the configuration, as JSON"
    )
    parser.add_argument("--documents", type=Path, help="documents of each step, for the reference")
    parser.add_argument(
        "--further",
        type=int,
        default=0,
        help="rounds that may be asked for after the first, on stdin",
    )
    return parser


def run_arm(
    chosen: argparse.Namespace, arms: Mapping[str, Mapping[str, str]], began: float
) -> None:
    """Import an arm, wait until a round is requested, and run it.

    Args:
        chosen: the parsed arguments.
        arms: module and function of each arm, by the kind of the work.
        began: start of the process by ``time.perf_counter``.
    """
    from chronicals.benchmark.measurement import ROUND, ArmPlan
    from chronicals.benchmark.plan import read_work

    work = read_work(chosen.work)
    module, function = arms[work.kind][chosen.name].split(":")
    run = getattr(importlib.import_module(module), function)
    ready = time.perf_counter()
    if sys.stdin.readline().strip() != ROUND:
        return
    began += time.perf_counter() - ready  # the time of waiting is not that of loading
    plan = ArmPlan(
        steps=chosen.steps,
        warm_up=chosen.warm_up,
        trace=chosen.trace,
        changes=chosen.changes,
        documents=chosen.documents,
        further=chosen.further,
        out=chosen.out,
        began=began,
    )
    run(work, plan)


if __name__ == "__main__":
    run_named_arm()
