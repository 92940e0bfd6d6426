"""Names of the objectives, read from their files: an import of these imports torch, which takes
too long for a help text.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import chronicals
from chronicals.config import ConfigurationError, Recipe
from chronicals.config.foreign import no_such_field, no_such_objective
from chronicals.config.sections import SHARED

REGISTERED = re.compile(r"^@register\((.*)\)$", re.MULTILINE)
NAME = re.compile(r'"(\w+)"')


def objective_names() -> list[str]:
    """What ``--objective`` takes, as the files of ``objectives`` register it."""
    files = sorted((Path(chronicals.__file__).parent / "objectives").glob("*.py"))
    return [
        name
        for file in files
        for found in REGISTERED.findall(file.read_text())
        for name in NAME.findall(found)
    ]


def with_known_names(recipe: Recipe) -> Recipe:
    """Return the recipe.

    Where objectives are imported already, there may be more than those in the files; then
    ``build_objective`` checks names.

    Raises:
        ConfigurationError: its objective is none, or a section is of none.
    """
    if "chronicals.objectives" in sys.modules:
        return recipe
    known = objective_names()
    lines = [] if recipe.objective in known else [no_such_objective(recipe.objective, known)]
    fields = [*known, SHARED, *(field.name for field in dataclasses.fields(recipe))]
    others = {
        name: given for name, given in recipe.sections.items() if name not in (*known, SHARED)
    }
    lines += [no_such_field(name, given, fields) for name, given in others.items()]
    if lines:
        raise ConfigurationError("\n".join(lines))
    return recipe
