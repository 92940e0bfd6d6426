"""Learning rates over a run, as factors of the highest one: a linear warm-up, then one of the
schedules.
"""

import math
from collections.abc import Callable


def _cosine(progress: float, _decay: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float, _decay: float) -> float:
    return 1 - progress


def _constant(_progress: float, _decay: float) -> float:
    return 1.0


def _warmup_stable_decay(progress: float, decay: float) -> float:
    """Constant, then linear decay over the fraction ``decay`` of the run (Hu et al., 2024,
    section 4.1).
    """
    return min(1.0, (1 - progress) / decay)


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _warmup_stable_decay,
}


def learning_rate_factor(
    schedule: str,
    step: int,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_ratio: float = 0.2,
) -> float:
    """The factor for step ``step`` (from 0): above 0 in the warm-up, falling to ``min_ratio``
    after the last step.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "wsd":
        decay_ratio *= total_steps / max(total_steps - warmup_steps, 1)
    return min_ratio + (1 - min_ratio) * SCHEDULES[schedule](
        min(progress, 1.0), min(decay_ratio, 1.0)
    )
