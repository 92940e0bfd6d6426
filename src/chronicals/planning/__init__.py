"""Plans for training on several GPUs without having them: memory, bytes sent and efficiency."""

from chronicals.planning.plan import Machines, Plan, plan
from chronicals.planning.traffic import Traffic, traffic

__all__ = ["Machines", "Plan", "Traffic", "plan", "traffic"]


def __dir__() -> list[str]:
    return sorted(__all__)
