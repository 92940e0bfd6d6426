"""One of two processes whose last decoder layers stay gathered: the program of
``test_layers_that_stay.py``.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from divided_ranks import batch_of, step_of, whole

import runs
import tiny
from chronicals.distributed import Mesh, is_divided, stay_gathered
from chronicals.memory import NOTHING, decoder_layers
from chronicals.objectives import build_objective
from chronicals.patching import patch_parts
from chronicals.planning.traffic import _Counted
from chronicals.policies import Facts, solver
from chronicals.policies.needed_memory import gathered_bytes
from chronicals.training.session import prepared

STEPS = 3
MICRO = 2

LAYERS = 3
"""Of the model that is broken off; a card has room for one or two of them."""


def train(count: int, ranks: Mesh, folder: Path) -> dict[str, Any]:
    """Losses, weights, and bytes gathered in the last step, with a pass without gradients after
    each step.
    """
    model = tiny.llama()
    patch_parts(model, whole_layers=True)
    config = runs.config(
        folder,
        objective="pretraining",
        learning_rate=1e-2,
        gradient_accumulation_steps=MICRO,
        sharding="weights",
    )
    seen = []
    batch = batch_of(99, 300)
    with prepared(model, config, build_objective(config), ranks) as session:
        stay_gathered(decoder_layers(model), count)
        with session.stepping():
            for number in range(STEPS):
                session.model.train()
                with _Counted() as counted:
                    scalars = session.train_once(step_of(number, ranks, MICRO * ranks.count, 300))
                seen.append([float(scalars["loss"]), float(scalars["grad_norm"])])
                with torch.no_grad():
                    session.presented.as_forward(
                        partial(session.objective.score, session.presented, batch)
                    )
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {
        "seen": seen,
        "weights": weights,
        "gathered": counted.sent["all_gather"],
        "layers": len(decoder_layers(model)),
    }


def break_off(ranks: Mesh, folder: Path) -> dict[str, Any]:
    """On cards of which each has room for one layer more than the one before: what was decided;
    which layers, and whether the embedding, are gathered after a forward pass that no backward
    pass followed, when the run has left its model, and when a run has that failed within its
    last layer; whether the loss falls from a step before that run to one after it."""
    model = tiny.llama(num_hidden_layers=LAYERS)
    batch = batch_of(99, 300)
    config = runs.config(folder, objective="pretraining", sharding="weights")
    estimated = solver.expected_memory

    def on_a_card(*given: Any) -> Any:
        frees, needed = estimated(*given)
        room = (ranks.rank + 1.5) * gathered_bytes(Facts(config, model))
        return frees, replace(needed, total=int((needed.needed(NOTHING) + room) / 0.9))

    def gathered() -> list[bool]:
        units = [*decoder_layers(model), model.get_input_embeddings()]
        return [not all(is_divided(p) for p in unit.parameters()) for unit in units]

    def step() -> float:
        with prepared(model, config, build_objective(config), ranks) as session, session.stepping():
            return float(session.train_once(step_of(0, ranks, ranks.count, 300))["loss"])

    solver.expected_memory = on_a_card
    with prepared(model, config, build_objective(config), ranks) as session, session.stepping():
        session.presented.as_forward(partial(session.objective, session.presented, batch))
        broken = gathered()
    left = gathered()
    losses = [step()]
    failing = decoder_layers(model)[-1].register_forward_pre_hook(_fail)
    with suppress(ValueError):
        step()
    failing.remove()
    failed = gathered()
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])  # a pass of the caller's own
    losses.append(step())
    solver.expected_memory = estimated
    decided = session.decisions["sharding"].stay
    return {
        "decided": decided,
        "broken": broken,
        "left": left,
        "failed": failed,
        "falls": losses[1] < losses[0],
    }


def _fail(*given: Any) -> None:
    raise ValueError("within a forward pass")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = Mesh.current()
    found = [train(count, ranks, folder) for count in (0, 1, 2)]
    broken = ranks.gather_values(break_off(ranks, folder))
    if ranks.writer:
        torch.save(found, folder / "found.pt")
        torch.save(broken, folder / "broken.pt")


if __name__ == "__main__":
    main()
