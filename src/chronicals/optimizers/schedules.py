"""Learning-rate schedules, as factors of the peak rate: a linear warm-up, then one of the
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
    """Return 1, then decay linearly over the last fraction ``decay`` (Hu et al., 2024, section
    4.1).
    """
    return min(1.0, (1 - progress) / decay)


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _warmup_stable_decay,
}
"""Functions by name: from progress after warm-up, 0 to 1, and decay fraction to the factor."""


def learning_rate_factor(
    schedule: str,
    step: int,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_ratio: float = 0.2,
) -> float:
    """Return the factor of the peak learning rate for a step.

    Args:
        schedule: one of ``SCHEDULES``.
        step: number of the step, from 0. The factor of step 0 is above 0 already.
        total_steps, warmup_steps: steps of the run, and of its warm-up.
        min_ratio: the factor after the last step.
        decay_ratio: fraction of the run in which ``wsd`` decays.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "wsd":
        # From a fraction of the run to one of the steps after warm-up.
        decay_ratio *= total_steps / max(total_steps - warmup_steps, 1)
    return min_ratio + (1 - min_ratio) * SCHEDULES[schedule](
        min(progress, 1.0), min(decay_ratio, 1.0)
    )
