"""Errors of a configuration, with a line for each field that is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic

from chronicals.config.errors import ConfigurationError
from chronicals.config.foreign import OUR_NAMES, no_such_field, own_value
from chronicals.config.values import FOREIGN

SOURCE_ERROR = "data_source"
"""Kind of an error whose lines describe the faults of each entry of data."""

NAMED_ENTRIES = ("gate", "columns")
"""Fields that hold named entries; messages also name the entry."""


def explain(
    cls: type,
    error: pydantic.ValidationError,
    given: Mapping[str, Any] | None = None,
    unknown: Callable[..., str] = no_such_field,
) -> ConfigurationError:
    """Return an error with a line for each mistake.

    A line has the field, its value, what is allowed, and what to write instead.

    Args:
        cls: the dataclass whose fields were passed.
        error: what pydantic found.
        given: the fields that were passed.
        unknown: returns the line on a field that does not exist.
    """
    given = given or {}
    known = [field.name for field in dataclasses.fields(cls)]
    lines: list[str] = []
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else cls.__name__
        if detail["type"] == "missing":
            if any(OUR_NAMES.get(theirs) == name for theirs in given):
                continue  # the line on their name says to write ours
            line = f"{name}: required, and was not given"
            base = given.get("base_model")
            if name == "model" and base is not None:
                line += (
                    f"; base_model={base!r} is the model of an adapter; use model={base!r} in "
                    "the place of base_model where a model is trained"
                )
            lines.append(line)
        elif detail["type"] == "unexpected_keyword_argument":
            value = detail["input"]
            line = unknown(name, value, known, given)
            lines.append(_accepted(cls, name, value, line, given))
        elif detail["type"] == SOURCE_ERROR:
            shown = "" if isinstance(detail["input"], (list, Mapping)) else f"={detail['input']!r}"
            lines += [f"{name}{shown}: {line}" for line in detail["msg"].splitlines()]
        else:
            lines.append(_wrong(name, detail, given))
    return ConfigurationError("\n".join(dict.fromkeys(lines)))


def _accepted(cls: type, name: str, value: Any, line: str, given: Mapping[str, Any]) -> str:
    """Return the line on a field with another name here.

    If our field does not take its value, the line says what is wrong with that.
    """
    ours = OUR_NAMES.get(name, "")
    if f"; use {ours}={value!r}" not in line:
        return line
    field = cls.__pydantic_fields__[ours]  # type: ignore[attr-defined]
    annotation: Any = Annotated[field.rebuild_annotation(), field]
    try:
        pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.ValidationError as error:
        return (
            f"{name}: no such field; {_wrong(ours, {**error.errors()[0], 'loc': (ours,)}, given)}"  # type: ignore[dict-item]
        )
    return line


def _wrong(name: str, detail: Any, given: Mapping[str, Any]) -> str:
    """Return the line on a value that is not taken."""
    path = [name]
    if name in NAMED_ENTRIES:
        path += [part for part in detail["loc"][1:] if isinstance(part, str)]
    line = f"{': '.join(path)}={detail['input']!r}: {detail['msg']}"
    if detail["type"] == FOREIGN:
        return line
    if detail["input"] is None:
        return f"{line}; leave it out"
    meant = own_value(name, given.get(name, detail["input"]))
    return f"{line}; {meant}" if meant else line


def raise_together(*checks: Callable[[], None]) -> None:
    """Run all checks.

    Raises:
        ConfigurationError: what those that failed say, a line each.
    """
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            lines.append(str(error))
    if lines:
        raise ConfigurationError("\n".join(lines))
