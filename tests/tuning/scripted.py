"""Studies whose runs are scripted: they take milliseconds, and the best settings are known."""

import sys
from pathlib import Path
from typing import Any

from scripted_run import PACKS

from chronicals.config import Recipe
from chronicals.tuning.schedule import Budget
from chronicals.tuning.tuner import Tuner

PROGRAM = (sys.executable, str(Path(__file__).parent / "scripted_run.py"))

BUDGET = Budget(PACKS // 4, batch_size=2, gradient_accumulation_steps=2, learning_rate=2e-4)

TUNE: dict[str, Any] = {"learning_rate": [1e-5, 1e-1, "log"], "weight_decay": [0.0, 0.3, "linear"]}


def recipe(folder: Path, **fields: Any) -> Recipe:
    usual = {"model": "m", "data": "d", "validation_split": 0.1, "output_dir": folder / "out"}
    return Recipe(**{**usual, **fields})


def tuner(folder: Path, tune: Any = None, fields: Any = (), **settings: Any) -> Tuner:
    """A tuner of scripted runs; ``settings`` are those of the study."""
    return Tuner(
        recipe(folder, **dict(fields)),
        folder / "study",
        {**(TUNE if tune is None else tune), **settings},
        program=PROGRAM,
        budget=lambda recipe: BUDGET,
    )
