"""Sections: settings of objectives, ``dpo: {beta: 0.1}``.

They are unchecked until the objective's own file checks them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from chronicals.config.errors import ConfigurationError
from chronicals.config.foreign import BY_VALUE, INSTEAD, NOWHERE, OUR_NAMES
from chronicals.config.values import lasting

SECTIONS_FIELD = "sections"
"""Name of the field with all sections: names of objectives, and their settings."""

SHARED = "router"
"""Section that any objective may have beside its own."""

PATH_SETTINGS = frozenset({"teacher", "reference_model"})
"""Settings, of any objective, that name a folder or a hub name."""


def lasting_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``sections`` with absolute paths, which hold in any folder."""
    result: dict[str, Any] = {}
    for section, settings in sections.items():
        result[section] = dict(settings)
        for name in PATH_SETTINGS & settings.keys():
            if isinstance(settings[name], str):
                result[section][name] = lasting(settings[name])
    return result


def gathered(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return ``fields`` with the mappings whose names are no fields' moved into ``sections``.

    Paths in them become texts.

    Raises:
        ConfigurationError: the section of the run's objective is no mapping.
    """
    fields_of_others = {*known, *OUR_NAMES, *INSTEAD, *NOWHERE, *BY_VALUE}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and name not in fields_of_others:
            sections[name] = {
                setting: os.fspath(given) if isinstance(given, Path) else given
                for setting, given in value.items()
            }
    own = fields.get("objective")
    if isinstance(own, str) and own in fields.keys() - sections.keys() - fields_of_others:
        if fields[own] is not None:
            raise ConfigurationError(
                f"{own}={fields[own]!r}: settings of an objective have names; give '{own}: "
                f"{{NAME: VALUE}}' in a recipe, "
                f"{own}={{'NAME': VALUE}} in Python"
            )
        sections[own] = {}  # an empty section in YAML
    if not sections:
        return dict(fields)
    rest = {name: value for name, value in fields.items() if name not in sections}
    return {**rest, SECTIONS_FIELD: merged(rest.get(SECTIONS_FIELD, {}), sections)}


def merged(sections: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both; those of ``others`` win."""
    return {
        name: {**sections.get(name, {}), **others.get(name, {})} for name in [*sections, *others]
    }


def in_sections(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with the settings of objectives, such as ``dpo.beta``, in sections."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        section, dot, setting = name.partition(".")
        if dot:
            found.setdefault(section, {})[setting] = value
        else:
            found[name] = value
    return found


def of_flags(texts: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the sections of ``dpo.beta=0.1`` texts of the command line.

    Values are read as YAML. A text that is no YAML, or a list (``[PAD]``) or mapping, which no
    setting takes, stays a text.
    """
    import yaml

    sections: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, _, value = text.partition("=")
        name, _, setting = path.partition(".")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        if isinstance(parsed, (list, dict)):
            parsed = value
        sections.setdefault(name, {})[setting] = parsed
    return sections
