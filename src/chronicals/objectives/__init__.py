"""What is minimised, a file an objective."""

from chronicals.models import Term, Terms
from chronicals.objectives.next_token import NextToken
from chronicals.objectives.terms import Count, Objective, divide, shown

OBJECTIVES = {"sft": NextToken, "pretraining": NextToken}
"""By the name in the configuration; what tells these two apart is which tokens the data marks as trained."""

__all__ = ["OBJECTIVES", "Count", "NextToken", "Objective", "Term", "Terms", "divide", "shown"]
