"""Policies: what a run switches on, what it costs, and what excludes what.

- ``Facts`` says once what a run is: its model, its mesh, its card, how documents are presented.
- A ``Policy`` is one file and one object. It says how it is asked for (``asked``), why it cannot
  run (``why_not``), what it adds and saves (``bytes``), how it is applied (``apply``,
  ``around_steps``), its words (``title``, ``words``), its advice (``spares``, ``remedies``), and how it
  joins a run that is short of memory (``addition``, ``join``).
- ``exclusions`` is the table of what excludes what; no policy names another one elsewhere.
- ``needed_memory`` adds the bytes of all policies up to an estimate, which is fitted to the card. It
  refuses what cannot fit, with the length that does, and asks every policy what it saves, for the
  words after a card is full.
- ``solver.decide`` asks every policy in turn, for the trainer; ``solver.fit_to_memory`` fits the
  memory, for the trainer and for plans.
- A new policy is one file of this folder that calls ``register_policy``: each file is imported.
"""

import importlib
import pkgutil

from chronicals.policies.facts import Facts
from chronicals.policies.policy import Decision, Policy, Stage, apply_policies, register_policy
from chronicals.policies.solver import decide, fit_to_memory, planned_peak, summary

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Decision",
    "Facts",
    "Policy",
    "Stage",
    "apply_policies",
    "decide",
    "fit_to_memory",
    "planned_peak",
    "register_policy",
    "summary",
]


def __dir__() -> list[str]:
    return sorted(__all__)
