"""Measurements and works made by hand."""

from pathlib import Path
from typing import Any

from chronicals.benchmark.measurement import Measurement
from chronicals.benchmark.plan import plan_work
from chronicals.benchmark.work import Work

FP32 = {"mixed_precision": "fp32"}


def work(
    folder: Path, mode: str = "full", data: str = "fixed", steps: int = 3, **fields: Any
) -> Work:
    return plan_work(folder, "tiny", data, mode, {**FP32, **fields}, steps, warm_up=2)


def measurement(rate: float = 1000.0, steps: int = 5, **changes: Any) -> Measurement:
    known: dict[str, Any] = {
        "settings": "made",
        "tokens": [100] * steps,
        "slots": [125] * steps,
        "seconds": [100 / rate] * steps,
        "losses": [7.0 - 0.1 * n for n in range(steps)],
        "grad_norms": [1.0 + 0.1 * n for n in range(steps)],
        "warm_up": 2,
        "peak_gib": 1.0,
        "trained_share": 1.0,
        "moved_share": 1.0,
    }
    return Measurement(**{**known, **changes})
