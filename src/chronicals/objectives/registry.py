"""The objectives by name, and their settings, which are checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.foreign import no_such_field, no_such_objective, setting_called
from chronicals.config.reward_entries import reward_text
from chronicals.config.sections import SHARED
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.moe.router_settings import RouterSettings
from chronicals.objectives.terms import Objective

OBJECTIVES: dict[str, type[Objective]] = {}
"""Objectives by their name in the configuration."""

BESIDE: dict[str, type] = {SHARED: RouterSettings}
"""Settings of the sections that any objective may have beside its own, by their names."""

C = TypeVar("C", bound=type[Objective])


def register(*names: str) -> Callable[[C], C]:
    """Return a decorator that makes a class an objective of the configuration.

    With the name ``dpo`` a configuration has ``objective="dpo"`` and a section ``dpo``, the class's
    ``Settings``.
    """

    def registered(cls: C) -> C:
        OBJECTIVES.update(dict.fromkeys(names, cls))
        return cls

    return registered


def build_objective(config: ChronicalsConfig) -> Objective:
    """Build the objective that ``config`` names, with its settings.

    Raises:
        ConfigurationError: there is no such objective, a section belongs to none or to another
            objective, a setting is wrong, or a field asks for what the objective cannot do.
    """
    name = config.objective
    if name not in OBJECTIVES:
        raise ConfigurationError(no_such_objective(name, OBJECTIVES))
    for section, given in config.sections.items():
        if section not in OBJECTIVES and section not in BESIDE:
            known = [*OBJECTIVES, *BESIDE, *(field.name for field in dataclasses.fields(config))]
            raise ConfigurationError(no_such_field(section, given, known))
        if section in OBJECTIVES and section != name:
            raise ConfigurationError(
                f"{section}={given}: settings of another objective than objective={name!r}; leave "
                "them out, or set "
                f"objective={section!r}"
            )
    if config.rewards and "prompt" not in OBJECTIVES[name].row_kinds:
        raise ConfigurationError(
            f"rewards={[reward_text(given) for given in config.rewards]}: "
            f"objective={name!r} trains the answers of its rows, and generates none to score; "
            "leave it out"
        )
    # An objective of pairs or judged answers is of whole answers, and not of prompts.
    if set(OBJECTIVES[name].row_kinds).isdisjoint(DOCUMENT_KINDS):
        if config.overlong == "split":
            raise ConfigurationError(
                f"overlong='split': objective={config.objective!r} compares whole answers, which "
                "cannot be split; set overlong='cut' or overlong='drop'"
            )
        if config.train_on == "all":
            raise ConfigurationError(
                f"train_on='all': objective={config.objective!r} is of answers, and not of their "
                "prompts; leave it out, or set train_on='answers'"
            )
    settings = _checked(name, OBJECTIVES[name].Settings, config)
    built = OBJECTIVES[name](settings, config.logits_chunk_size)
    if "router" in config.sections:
        built.router = _checked("router", BESIDE["router"], config)
    return built


def _checked(section: str, settings: type, config: ChronicalsConfig) -> Any:
    """Return the settings of a section.

    Raises:
        ConfigurationError: settings are wrong; the message has a part for each of them: its section,
            name and value, and what is allowed.
    """
    try:
        return settings(**config.sections.get(section, {}))
    except pydantic.ValidationError as error:
        faults = error.errors()
    known = [field.name for field in dataclasses.fields(settings)]
    lines = []
    for fault in faults:
        if not fault["loc"]:  # of several settings together
            lines.append(f"{section}: {fault['msg'].removeprefix('Value error, ')}")
            continue
        field = str(fault["loc"][0])
        given = f"{section}={{{field!r}: {fault['input']!r}}}"
        if fault["type"] == "missing":
            lines.append(
                f"{section}: {field} is required, and was not given; set {section}={{{field!r}: "
                f"'...'}}"
            )
        elif fault["type"] == "unexpected_keyword_argument":
            there = f"there are {', '.join(map(repr, known))}" if known else "it has none"
            lines.append(f"{given}: no such setting; {setting_called(field, known) or there}")
        else:
            lines.append(f"{given}: {fault['msg']}")
    raise ConfigurationError("; ".join(lines))
