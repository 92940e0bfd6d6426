"""Memory of a run that answers and trains in turns, beside training alone, on a card.

    python benchmarks/generation_turns.py OUT.json             # a 0.5B, some minutes
    python benchmarks/generation_turns.py OUT.json --tiny      # tiny sizes, also without a card

Each arm runs in a process of its own: steps of full fine-tuning, with and without a rollout before
each step, with and without CUDA graphs (of steps and of decode steps). For each turn it writes the
peaks of allocated and of reserved memory of the rollout and of the step, and their seconds. The
promise: no turn takes more than 1.05 x the larger of training alone and weights with cache, and
later turns take no more than earlier ones. Graphs of steps must be captured once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cards_models import step_of
from generation_rows import Row, prompts_of
from recipes_on_card import GIB, forked, machine, model_of

from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.generation import EngineSettings, Request, Sampling
from chronicals.objectives import build_objective
from chronicals.training.rollouts.turns import Turns
from chronicals.training.session import prepared

TURNS = 20
WARM = 4
"""Turns in which kernels are compiled and graphs captured; growth is looked for behind them."""

WIDTH = 4096
"""Tokens of a step, one document."""

PROMPT, NEW = 256, 128
ROW = Row("0.5b, 64 x 8", "0.5b", 64)
CACHE = 3 << 30
"""Bytes of keys and values: about what the answers take, and activations of a step."""

ALLOWED = 1.05
"""Peak of a turn, at most, by the larger of training alone and weights with cache."""


def settings_of(folder: str, graphed: bool, tiny: bool) -> ChronicalsConfig:
    """Return full fine-tuning of one micro-batch a step."""
    return ChronicalsConfig(
        output_dir=folder,
        batch_size=1,
        gradient_accumulation_steps=1,
        max_seq_length=256 if tiny else WIDTH,
        use_lora=False,
        use_torch_compile=False,
        mixed_precision="bf16",
        **({"use_cuda_graphs": graphed} if torch.cuda.is_available() else {}),
    )


def peaks_of(run: Callable[[], Any]) -> dict[str, float]:
    """Run a function, and return its seconds and the peaks of memory; 0 without a card."""
    on_card = torch.cuda.is_available()
    if on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    run()
    if on_card:
        torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - begun,
        "allocated": torch.cuda.max_memory_allocated() if on_card else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_card else 0,
    }


def measured(answers: bool, graphed: bool, tiny: bool) -> dict[str, Any]:
    """Take turns of an arm, and return what each took.

    Args:
        answers: a rollout before each step.
        graphed: CUDA graphs of steps and of decode steps.
        tiny: tiny sizes.
    """
    width = 256 if tiny else WIDTH
    prompt, new = (32, 16) if tiny else (PROMPT, NEW)
    model = model_of(ROW.model, max(width, prompt + new), tiny)
    vocabulary = model.config.vocab_size
    prompts = prompts_of(ROW, vocabulary, prompt)
    config = settings_of(tempfile.mkdtemp(), graphed, tiny)
    rollouts, steps, losses = [], [], []
    with prepared(model, config, build_objective(config)) as session, session.stepping():
        session.model.train()
        engine = EngineSettings(CACHE, slots=ROW.sequences, steps_a_look=8, use_cuda_graphs=graphed)
        turns = Turns(session, engine)

        def train(step: Step) -> None:
            losses.append(float(session.train_once(step)["loss"]))

        for turn in range(TURNS):
            requests = [
                Request(ids, new, Sampling(1.0, seed=turn), ROW.answers, number)
                for number, ids in enumerate(prompts)
            ]
            if answers:
                rollouts.append(peaks_of(partial(turns.generate, requests)))
            step = step_of(turn, 0, 1, 1, 1, width, vocabulary)
            steps.append(peaks_of(partial(train, step)))
        held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        graphs = session._graphed
        releases = None if graphs is None else [len(graphs.of_micro), graphs.releases]
    return {
        "between": held,
        "rollouts": rollouts,
        "steps": steps,
        "losses": losses,
        "graphs and releases": releases,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=float, default=140, help="seconds of an arm")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = {"machine": forked(machine, 60)}
    for graphed in (False, True):
        arms = dict[str, Any]()
        for name, answers in (("alone", False), ("in turns", True)):
            arms[name] = forked(partial(measured, answers, graphed, given.tiny), given.each)
        results["with graphs" if graphed else "without graphs"] = arms
        given.out.write_text(json.dumps(results))
        print(line_of(graphed, arms), flush=True)


def line_of(graphed: bool, arms: dict[str, Any]) -> str:
    """Return a line on both arms for the terminal."""
    name = "with graphs" if graphed else "without graphs"
    errors = [arm["error"] for arm in arms.values() if "error" in arm]
    if errors:
        return f"{name}: {errors[0][:300]}"
    found = list[str]()
    for kind in ("allocated", "reserved"):
        alone = max(one[kind] for one in arms["alone"]["steps"])
        both = arms["in turns"]
        each = [max(a[kind], b[kind]) for a, b in zip(both["rollouts"], both["steps"])]
        bound = ALLOWED * max(alone, both["between"] + CACHE)
        grown = max(each[WARM:]) - max(each[: WARM + 1])
        found.append(
            f"{kind} {max(each) / GIB:.2f} GiB, alone {alone / GIB:.2f}, bound {bound / GIB:.2f}, "
            f"grown by {grown / GIB:.3f}"
        )
    seconds = sum(one["seconds"] for one in arms["in turns"]["rollouts"][WARM:])
    return f"{name}: {'; '.join(found)}; {seconds / (TURNS - WARM):.2f} s a rollout"


if __name__ == "__main__":
    main()
