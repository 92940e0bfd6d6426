"""Sections: settings of objectives, ``dpo: {beta: 0.1}``, held as they were given until the
objective's file checks them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from chronicals.config.errors import ConfigurationError
from chronicals.config.foreign import BY_VALUE, INSTEAD, NOWHERE, OURS
from chronicals.config.paths import lasting

SECTIONS = "sections"
"""The field that holds them: the name of an objective, and its settings."""


SHARED = "router"
"""Section that any objective may have beside its own."""

PATHS = frozenset({"teacher", "reference_model"})
"""Settings, of any objective, that name a folder or a hub name."""


def lasting_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """``sections`` with absolute paths, to be found again from another folder."""
    return {
        section: {
            name: lasting(value) if name in PATHS and isinstance(value, str) else value
            for name, value in given.items()
        }
        for section, given in sections.items()
    }


def gathered(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """``fields`` with each mapping that stands under the name of no field moved into ``sections``,
    paths as texts.

    Raises:
        ConfigurationError: under the name of the run's objective there is something else.
    """
    elsewhere = {*known, *OURS, *INSTEAD, *NOWHERE, *BY_VALUE}
    found = {
        name: _texts(value)
        for name, value in fields.items()
        if isinstance(value, Mapping) and name not in elsewhere
    }
    own = fields.get("objective")
    if isinstance(own, str) and own in fields.keys() - found.keys() - elsewhere:
        if fields[own] is not None:
            raise ConfigurationError(
                f"{own}={fields[own]!r}: settings of an objective have names; give '{own}: "
                f"{{NAME: VALUE}}' in a recipe, "
                f"{own}={{'NAME': VALUE}} in Python"
            )
        found[own] = {}  # in YAML a section without a line
    if not found:
        return dict(fields)
    rest = {name: value for name, value in fields.items() if name not in found}
    return {**rest, SECTIONS: merged(rest.get(SECTIONS, {}), found)}


def _texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: os.fspath(value) if isinstance(value, Path) else value
        for name, value in settings.items()
    }


def merged(sections: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting of both, that of ``others`` where both have it."""
    return {
        name: {**sections.get(name, {}), **others.get(name, {})} for name in [*sections, *others]
    }


def of_flags(texts: Collection[str]) -> dict[str, dict[str, Any]]:
    """Of ``dpo.beta=0.1`` texts, as the command line has them; values are read as YAML, and as
    text where they are none, or lists (``[PAD]``), which no setting takes."""
    import yaml

    sections: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, _, value = text.partition("=")
        name, _, setting = path.partition(".")
        try:
            found = yaml.safe_load(value)
        except yaml.YAMLError:
            found = value
        sections.setdefault(name, {})[setting] = value if isinstance(found, (list, dict)) else found
    return sections
