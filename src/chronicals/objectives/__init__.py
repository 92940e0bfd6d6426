"""Objectives: what is minimised, a file each.

Every file of this folder is imported, and registers its own.
"""

import importlib
import pkgutil

from chronicals.models import Term, Terms
from chronicals.objectives.registry import OBJECTIVES, build_objective, register
from chronicals.objectives.terms import (
    Column,
    Columns,
    Count,
    FrozenModel,
    Objective,
    Paper,
    ScoredDocument,
    divide,
    settings,
    shown,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from chronicals.objectives.next_token import NextToken  # noqa: E402

__all__ = [
    "OBJECTIVES",
    "Column",
    "Columns",
    "Count",
    "FrozenModel",
    "NextToken",
    "Objective",
    "Paper",
    "ScoredDocument",
    "Term",
    "Terms",
    "build_objective",
    "divide",
    "register",
    "settings",
    "shown",
]


def __dir__() -> list[str]:
    return sorted(__all__)
