"""Plans for training on several GPUs without having them: memory, bytes sent and efficiency."""

from chronicals.cards import Rates, asked_rates, rates_here, rates_of
from chronicals.planning.plan import Machines, Plan, plan, planned_space
from chronicals.planning.planned_models import planned_model
from chronicals.planning.space import Space
from chronicals.planning.traffic import Traffic, traffic
from chronicals.policies.frozen_models import planned_frozen
from chronicals.policies.step_time import Documents, StepTime

__all__ = [
    "Documents",
    "Machines",
    "Plan",
    "Rates",
    "Space",
    "StepTime",
    "Traffic",
    "asked_rates",
    "plan",
    "planned_frozen",
    "planned_model",
    "planned_space",
    "rates_here",
    "rates_of",
    "traffic",
]


def __dir__() -> list[str]:
    return sorted(__all__)
