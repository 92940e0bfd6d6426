"""Cost in held-out loss of shared experts that stand in for missing ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chronicals.patching.expert_offload import Offload
from chronicals.training.run.evaluation import Evaluation


def with_soft_cost(measure: Callable[[], Evaluation], offload: Offload) -> dict[str, Any]:
    """Evaluate an offloaded model twice: as it is in ``mode="soft"``, and exactly.

    Args:
        measure: evaluates the model on the same data each time.
        offload: its experts.

    Returns:
        The figures of soft mode by name, and beside them ``exact_loss``, the loss when products
        wait for missing experts, ``soft_cost``, the loss above it, and ``fallback_mass``, the share
        of the routing weight that shared experts stood in for.
    """
    soft = measure()
    fallback_mass = offload.report().fallback_mass
    with offload.exact():
        exact = measure()
    return {
        **soft.to_dict(),
        "exact_loss": exact.loss,
        "soft_cost": soft.loss - exact.loss,
        "fallback_mass": fallback_mass,
    }
