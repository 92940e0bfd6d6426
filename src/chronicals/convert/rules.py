"""Rules: functions that answer a setting by its value and the configuration that it stands in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chronicals.convert.answers import Answer, not_needed
from chronicals.convert.reading import Theirs

Rule = Callable[[Any, Theirs], Answer | None]
"""Takes a value and the whole configuration; returns None where the tables answer."""


def always(answer: Answer) -> Rule:
    """Return the rule that gives the same answer to every value."""
    return lambda value, theirs: answer


def off_or(answer: Answer | None) -> Rule:
    """Return the rule of a switch: nothing is needed where it is off, else it gives ``answer``."""
    return lambda value, theirs: answer if value else not_needed("it is off")
