"""One arm in a process of its own: ``python -m chronicals.benchmark.arm WORK_FOLDER NAME --steps N
--out FILE``.

Nothing of torch is imported before the arm is known: Unsloth must come first in its process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicals.benchmark.work import Work

ARMS = {
    "ours": "ours:ours",
    "transformers": "plain:transformers",
    "transformers-recompute": "plain:transformers_recompute",
    "torch-compile": "plain:torch_compile",
    "liger": "plain:liger",
    "unsloth": "unsloth:unsloth",
    "unsloth-recompute": "unsloth:unsloth_recompute",
    "unsloth-padded": "unsloth:unsloth_padded",
    "unsloth-compiled": "unsloth:unsloth_compiled",
    "trl": "trl:trl",
    "trl-recompute": "trl:trl_recompute",
    "reference": "plain:reference",
}
"""Arms over documents: module and function in ``arms``."""

PAIR_ARMS = {
    "ours": "ours:ours",
    "trl": "preference:trl",
    "trl-recompute": "preference:trl_recompute",
    "unsloth": "unsloth_preference:unsloth",
    "unsloth-recompute": "unsloth_preference:unsloth_recompute",
    "reference": "pair_reference:reference",
}
"""Arms over pairs of answers."""

TAUGHT_ARMS = {
    "ours": "ours:ours",
    "transformers": "distilled:transformers",
    "liger": "distilled:liger",
    "reference": "distilled:reference",
}
"""Arms over documents with a teacher."""

ARMS_OF = {"documents": ARMS, "pairs": PAIR_ARMS, "taught": TAUGHT_ARMS}


def main(arguments: list[str] | None = None) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m chronicals.benchmark.arm")
    parser.add_argument("work", type=Path)
    parser.add_argument("name", choices=[*ARMS, "prepare"])
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
    given = parser.parse_args(arguments)
    if given.name.startswith("unsloth"):
        from chronicals.benchmark.arms.unsloth_import import import_unsloth

        import_unsloth(given.work, given.name)

    from chronicals.benchmark.work import Work

    work = Work.read(given.work)
    if given.name == "prepare":
        from chronicals.benchmark.work import prepare

        prepare(work)
        given.out.write_text(json.dumps(_rates(work)))
    else:
        from chronicals.benchmark.measurement import ArmPlan, asked_for_a_round

        module, function = ARMS_OF[work.kind][given.name].split(":")
        run = getattr(importlib.import_module(f"chronicals.benchmark.arms.{module}"), function)
        ready = time.perf_counter()
        if not asked_for_a_round():
            return
        began += time.perf_counter() - ready
        plan = ArmPlan(
            given.steps,
            given.warm_up,
            given.trace,
            given.changes,
            given.documents,
            given.further,
            given.out,
            began,
        )
        run(work, plan)


def _rates(work: Work) -> dict[str, Any]:
    """The rates, or what kept them from being measured: a row without a reference step is still
    a row.
    """
    from chronicals.benchmark.rates import machine, measure_rates

    if work.kind != "documents":
        return {"machine": machine()}
    try:
        return measure_rates(work)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
