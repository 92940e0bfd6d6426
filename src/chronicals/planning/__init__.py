"""Plans for training on several GPUs without having them: memory, bytes sent and efficiency."""

from chronicals.planning.plan import Machines, Plan, plan, planned_space
from chronicals.planning.planned_models import planned_frozen, planned_model
from chronicals.planning.space import Space
from chronicals.planning.traffic import Traffic, traffic

__all__ = [
    "Machines",
    "Plan",
    "Space",
    "Traffic",
    "plan",
    "planned_frozen",
    "planned_model",
    "planned_space",
    "traffic",
]


def __dir__() -> list[str]:
    return sorted(__all__)
