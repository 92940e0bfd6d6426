"""Names of the objectives, read from the text of their files: importing them imports torch, which
takes too long for a help text.
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

REGISTER_CALL = re.compile(r"^@register\((.*)\)$", re.MULTILINE)
QUOTED_NAME = re.compile(r'"(\w+)"')


def objective_names() -> list[str]:
    """Return the objectives that the files of ``objectives`` register."""
    names: list[str] = []
    for file in sorted((Path(chronicals.__file__).parent / "objectives").glob("*.py")):
        for arguments in REGISTER_CALL.findall(file.read_text()):
            names += QUOTED_NAME.findall(arguments)
    return names


def with_known_names(recipe: Recipe) -> Recipe:
    """Return the recipe, if its objective and its sections exist.

    If objectives are imported already, there may be more than those in the files; then
    ``build_objective`` checks names.

    Raises:
        ConfigurationError: there is no such objective, or a section is of none.
    """
    if "chronicals.objectives" in sys.modules:
        return recipe
    known = objective_names()
    lines = [] if recipe.objective in known else [no_such_objective(recipe.objective, known)]
    fields = [*known, SHARED, *(field.name for field in dataclasses.fields(recipe))]
    for name, settings in recipe.sections.items():
        if name not in (*known, SHARED):
            lines.append(no_such_field(name, settings, fields))
    if lines:
        raise ConfigurationError("\n".join(lines))
    return recipe
