"""Every field of a recipe as a flag, made from the fields themselves: one home for names, types and help."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from chronicals.config import ConfigurationError, Recipe


def with_recipe_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the ``**flags`` of ``command`` by an option for each field of ``Recipe``; those given arrive in it."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = typing.get_type_hints(Recipe)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, help=_help(field), rich_help_panel="Recipe fields", show_default=False),
            annotation=_flag_type(hints[field.name]) | None,
        )
        for field in dataclasses.fields(Recipe)
    ]
    names = [parameter.name for parameter in own]

    def wrapper(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in list(given) if name not in names}
        set_here = {name: value for name, value in flags.items() if value not in (None, [])}
        return command(**given, **{name: _one_text(hints[name], value) for name, value in set_here.items()})

    hinted = typing.get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hinted[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapper.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    return wrapper


def make_room_for(output: Path | None) -> None:
    """Make the folder of a file that is written when the work is done, and see before it that this can be.

    Raises:
        ConfigurationError: it cannot be written there.
    """
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        reason = "is a folder" if output.is_dir() else "may not be written"
        raise ConfigurationError(f"output={str(output)!r}: {reason}; name a file that can be written")


def _one_text(hint: Any, value: Any) -> Any:
    """A flag given once as a text where its field takes one, unless it is a plain name: a pattern, ``all-linear``."""
    takes_text = typing.get_origin(hint) is types.UnionType and str in typing.get_args(hint)
    if takes_text and isinstance(value, list) and len(value) == 1 and not re.fullmatch(r"[\w.]+", value[0]):
        return value[0]
    return value


def _help(field: dataclasses.Field) -> str:
    about: Any = field.default  # pydantic's FieldInfo
    default = about.get_default(call_default_factory=True) if hasattr(about, "get_default") else None
    required = about.is_required() if hasattr(about, "is_required") else False
    text = about.description if hasattr(about, "description") else field.name
    return text if required or default is None else f"{text} [{default}]"


def _flag_type(annotation: Any) -> Any:
    """The type a flag of this annotation takes: limits are the configuration's business, lists and
    ``name=value`` may be repeated."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [_flag_type(kind) for kind in typing.get_args(annotation) if kind is not type(None)]
        return list[str] if list[str] in kinds else kinds[0]
    if typing.get_origin(annotation) in (list, dict):
        return list[str]
    if typing.get_origin(annotation) is typing.Literal:
        return str
    return annotation if annotation in (int, float, bool, str, Path) else str
