"""What is minimised, a file an objective."""

from chronicals.objectives.next_token import NextToken
from chronicals.objectives.router_term import WithRouterLoss, with_router_loss
from chronicals.objectives.terms import Count, Objective, Term, Terms, divide

OBJECTIVES = {"sft": NextToken, "pretraining": NextToken}
"""By the name in the configuration; what tells these two apart is which tokens the data marks as trained."""

__all__ = [
    "OBJECTIVES", "Count", "NextToken", "Objective", "Term", "Terms", "WithRouterLoss", "divide", "with_router_loss",
]  # fmt: skip
