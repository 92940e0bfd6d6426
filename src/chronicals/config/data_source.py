"""DataSource: one of the files, folders or hub names that are trained on, and how much of it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from chronicals.config.errors import ConfigurationError
from chronicals.config.explanations import SOURCE_ERROR, explain
from chronicals.config.foreign import no_such_field_of_data
from chronicals.config.values import as_value_list, exists_here, split_values

_T = TypeVar("_T", bound=type)


def _raises_configuration_errors(cls: _T) -> _T:
    validated = cls.__init__  # type: ignore[misc]
    names = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(validated)
    def __init__(self: Any, *values: Any, **fields: Any) -> None:
        try:
            # Positional values are passed by name, so that an error has the field's name.
            validated(self, *values[len(names) :], **dict(zip(names, values)), **fields)
        except pydantic.ValidationError as error:
            raise explain(cls, error, unknown=no_such_field_of_data) from None

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


@_raises_configuration_errors
@dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class DataSource:
    """A source of rows, and how often each row is seen in an epoch.

    Attributes:
        path: a file, a folder, a pattern such as ``parts/*.jsonl``, or ``owner/name`` on the hub;
            what exists here wins.
        subset: configuration of a hub name.
        split: split of a hub name or of a saved ``DatasetDict`` (``train`` where it is not given).
        weight: how often a row is seen in an epoch: 0.5 takes half of the rows, 2 each row twice,
            2.5 each row twice and half of them a third time. Which rows make up the half depends on
            the seed and on nothing else.
        columns: new names of columns, ours to theirs: ``{"prompt": "question"}``; a dot leads into
            nested objects.
        name: what messages call it beside file and row.

    Raises:
        ConfigurationError: a field is unknown, of the wrong type or out of range.
    """

    path: Annotated[
        str,
        BeforeValidator(lambda path: os.fspath(path) if isinstance(path, Path) else path),
        Field(min_length=1),
    ]
    subset: str | None = None
    split: str | None = None
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    columns: dict[str, str] | None = None
    name: str | None = None


ROW_FIELDS = frozenset(
    {
        "messages",
        "conversations",
        "prompt",
        "completion",
        "response",
        "label",
        "instruction",
        "output",
        "chosen",
        "rejected",
        "responses",
        "scores",
        "input_ids",
        "text",
        "question",
        "answer",
        "query",
        "input",
        "history",
        "system",
        "tools",
        "labels",
        "attention_mask",
    }
)
"""Names of the fields of rows that are read."""


def _columns(value: Any) -> Any:
    """Return a mapping from our names to theirs, also of ``theirs=ours`` texts."""
    texts = as_value_list(value)
    mapping: Any = dict[str, str]() if isinstance(texts, list) else texts
    pairs: list[str] = []
    if isinstance(texts, list):
        for text in texts:  # which may hold several pairs, too: none of our names has a comma
            pairs += as_value_list(str(text))
    for text in pairs:
        theirs, sign, ours = (part.strip() for part in text.partition("="))
        if not (sign and theirs and ours):
            raise PydanticCustomError(
                "columns", "{text} is not THEIRS=OURS, as in question=prompt", {"text": repr(text)}
            )
        if theirs in ROW_FIELDS and ours not in ROW_FIELDS:
            theirs, ours = ours, theirs
        if ours in mapping:
            raise PydanticCustomError("columns", "{name} is named twice", {"name": repr(ours)})
        mapping[ours] = theirs
    unknown = sorted(map(str, set(mapping) - ROW_FIELDS)) if isinstance(mapping, Mapping) else []
    if unknown:
        raise PydanticCustomError(
            "columns",
            "{name} is no field that is read; there are {known}",
            {"name": ", ".join(map(repr, unknown)), "known": ", ".join(sorted(ROW_FIELDS))},
        )
    return mapping


ColumnNames = Annotated[dict[str, str] | None, BeforeValidator(_columns)]
"""New names of the columns of all sources, ours to theirs; on the command line ``theirs=ours``."""


def with_columns(sources: str | list[DataSource] | None, columns: Mapping[str, str] | None) -> Any:
    """Return the sources, with ``columns`` for those that have none of their own."""
    if not sources or not columns:
        return sources
    listed = [DataSource(sources)] if isinstance(sources, str) else sources
    return [
        source if source.columns else dataclasses.replace(source, columns=dict(columns))
        for source in listed
    ]


def _parsed(value: Any) -> Any:
    """Return a text without a weight as it is, and anything else as a list of sources."""
    values: list[Any] = []
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        # Commas divide a text, unless a file has that name or pattern.
        if (
            isinstance(entry, str)
            and not exists_here(entry)
            and not exists_here(_weighted(entry)[0])
        ):
            values += split_values(entry)
        else:
            values.append(entry)
    if not values:
        raise PydanticCustomError(SOURCE_ERROR, "an empty list; name at least one source")
    sources: list[DataSource] = []
    try:
        for one in values:
            if isinstance(one, DataSource):
                sources.append(one)
            elif isinstance(one, (str, Path)):
                path, weight = _weighted(os.fspath(one))
                sources.append(DataSource(path, weight=weight))
            elif isinstance(one, Mapping):
                sources.append(DataSource(**{str(name): field for name, field in one.items()}))
            else:
                raise ConfigurationError(
                    f"{one!r} is {type(one).__name__}; a source is a string or a mapping with "
                    "'path'"
                )
    except ConfigurationError as error:
        raise PydanticCustomError(SOURCE_ERROR, "{reason}", {"reason": str(error)}) from None
    return sources[0].path if sources == [DataSource(sources[0].path)] else sources


def _weighted(text: str) -> tuple[str, float]:
    """Divide ``path=weight``, unless a file has that name or pattern."""
    path, sign, weight = text.rpartition("=")
    if not sign or not path or exists_here(text):
        return text, 1.0
    try:
        return path, float(weight)
    except ValueError:
        return text, 1.0


def _plain(value: str | list[DataSource] | None) -> Any:
    """Return sources as a recipe has them, without fields that have their defaults."""
    if value is None or isinstance(value, str):
        return value
    entries = []
    for source in value:
        fields = dataclasses.asdict(source)
        defaults = {name: getattr(DataSource, name, None) for name in fields}
        entries.append({name: fields[name] for name in fields if fields[name] != defaults[name]})
    return entries


Sources = Annotated[str | list[DataSource], BeforeValidator(_parsed), PlainSerializer(_plain)]
"""Data of a recipe: a string (a path, or ``path=weight``), a mapping of the fields of
``DataSource``, or a list of these."""

OptionalSources = Annotated[
    str | list[DataSource] | None,
    BeforeValidator(lambda value: value if value is None else _parsed(value)),
    PlainSerializer(_plain),
]
