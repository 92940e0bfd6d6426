"""One of two processes that divide the weights of models of many families: the program of
``test_divided_families.py``.

``python divided_families.py FOLDER FAMILY …``: losses and norms of both together and of the first
alone are in ``FAMILY.json``. All weights are trained, or of ``FAMILY+LoRA`` adapters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import families
import runs
from chronicals.batch import IGNORED, Batch
from chronicals.data.packs.steps import Step
from chronicals.distributed import Mesh
from chronicals.objectives import build_objective
from chronicals.patching import patch_parts
from chronicals.training.session import prepared

STEPS = 2
LENGTHS = (7, 3, 12)
LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


def step_of(number: int, ranks: Mesh) -> Step:
    """This rank's micro-batches of a step of two."""
    batches = []
    for n in range(2):
        drawing = torch.Generator().manual_seed(2 * number + n)
        ids = torch.randint(1, families.VOCABULARY, (sum(LENGTHS),), generator=drawing)
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
        targets = ids.roll(-1)
        targets[bounds[1:] - 1] = IGNORED
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        batches.append(Batch(ids, targets, positions, bounds.to(torch.int32), max(LENGTHS)))
    targets_in_all = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    return Step(
        batches[ranks.rank :: ranks.count],
        {"targets": targets_in_all, "tokens": 2 * sum(LENGTHS)},
        None,
        None,
    )


def train(family: str, ranks: Mesh, folder: Path) -> list[list[float]]:
    torch.manual_seed(0)
    name, _, adapters = family.partition("+")
    model = families.build(name)
    patch_parts(model, whole_layers=True)
    own = {"sharding": "weights"} if ranks.count > 1 else {}
    own |= LORA if adapters else {}
    config = runs.config(
        folder,
        gradient_accumulation_steps=2 // ranks.count,
        learning_rate=1e-3,
        objective="pretraining",
        **own,
    )
    with prepared(model, config, build_objective(config), ranks) as session, session.stepping():
        session.model.train()
        found = [session.train_once(step_of(number, ranks)) for number in range(STEPS)]
        return [[float(scalars["loss"]), float(scalars["grad_norm"])] for scalars in found]


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Mesh.current()
    for family in names:
        found = {"together": train(family, ranks, Path(folder))}
        if ranks.writer:
            found["alone"] = train(family, Mesh(), Path(folder))
            (Path(folder) / f"{family}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
