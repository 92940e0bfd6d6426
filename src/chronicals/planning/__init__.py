"""Plans for training on several GPUs without having them: memory, bytes sent and efficiency."""

from chronicals.planning.plan import Machines, Plan, plan
from chronicals.planning.rates import Rates, rates_here, rates_of
from chronicals.planning.step_time import Documents, StepTime
from chronicals.planning.traffic import Traffic, traffic

__all__ = [
    "Documents",
    "Machines",
    "Plan",
    "Rates",
    "StepTime",
    "Traffic",
    "plan",
    "rates_here",
    "rates_of",
    "traffic",
]


def __dir__() -> list[str]:
    return sorted(__all__)
