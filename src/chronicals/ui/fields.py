"""Fields of a form, made from the schema of a checked dataclass, and their values as texts.

A form holds texts. They are read by the rules of the command line: what a field takes there as
text, it takes here, and the recipe says what is wrong with it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
import yaml
from pydantic_core import PydanticCustomError

from chronicals.config import Recipe
from chronicals.config.checked_class import headings_of
from chronicals.config.sections import SECTIONS_FIELD
from chronicals.config.values import split_values

FieldKind = Literal["switch", "choice", "number", "text", "list", "mapping", "sources"]

SOURCES = ("data", "validation_data")
"""Fields with an entry in each line, because the name of a file may have a comma."""

BOUNDS = {
    "exclusiveMinimum": ">",
    "minimum": "≥",
    "exclusiveMaximum": "<",
    "maximum": "≤",
}
NOTHING = "null"
"""Text of a field that is set to nothing, as ``max_grad_norm: null``."""


@dataclass(frozen=True)
class FormField:
    """A field of a form.

    Attributes:
        name: of the field, or ``SECTION.SETTING``.
        heading: title of the group it is in.
        kind: which input it has.
        help: what it does, from the schema.
        default: its default as text; empty if it has none.
        choices: the words that it takes; empty if it takes others.
        bounds: what its numbers must be, as ``> 0``.
        required: True if a run cannot begin without it.
        takes_text: of a list: one text is a value, too (a pattern).
    """

    name: str
    heading: str
    kind: FieldKind
    help: str
    default: str = ""
    choices: tuple[str, ...] = ()
    bounds: str = ""
    required: bool = False
    takes_text: bool = False

    def value(self, text: str) -> Any:
        """Return the value of a text; what cannot be read stays a text, which the recipe refuses."""
        text = text.strip()
        if text == NOTHING and self.kind != "text":
            return None
        if self.kind == "switch":
            return {"true": True, "false": False}.get(text.lower(), text)
        if self.kind == "number":
            return _number(text)
        if self.kind == "sources":
            entries = [_in_yaml(line) for line in text.splitlines() if line.strip()]
            return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries
        if self.kind in ("list", "mapping") and text[:1] in ("[", "{"):
            return _in_yaml(text)
        if self.kind == "list" and not self.takes_text:
            try:
                return split_values(text)
            except PydanticCustomError:
                return text
        return text

    def text(self, value: Any) -> str:
        """Return the text of a value, which ``value`` reads as the same."""
        if value is None:
            return NOTHING
        if isinstance(value, bool):
            return str(value).lower()
        if self.kind == "sources":
            entries = value if isinstance(value, list) else [value]
            return "\n".join(e if isinstance(e, str) else _flow(e) for e in entries)
        return _flow(value) if isinstance(value, (list, Mapping)) else str(value)


def _number(text: str) -> Any:
    for number in (int, float):
        try:
            return number(text.removeprefix("+").replace(".inf", "inf"))
        except ValueError:
            continue
    return text


def _in_yaml(text: str) -> Any:
    """Return a list or mapping in YAML's flow form; another text is itself."""
    if text.strip()[:1] not in ("[", "{"):
        return text.strip()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _flow(value: Any) -> str:
    return yaml.safe_dump(
        value, default_flow_style=True, width=1 << 16, sort_keys=False, allow_unicode=True
    ).strip()


@functools.cache
def recipe_fields() -> dict[str, FormField]:
    """Return the fields of a recipe by name, in the order of its headings, apart from sections."""
    schema = pydantic.TypeAdapter(Recipe).json_schema()
    headings = headings_of(Recipe)
    known = {name: heading for name, heading in headings.items() if name in schema["properties"]}
    known |= {name: "" for name in schema["properties"] if name not in known}
    order = list(dict.fromkeys(known.values()))
    names = sorted(known, key=lambda name: order.index(known[name]))
    return {
        name: field_of(name, schema["properties"][name], known[name], name in schema["required"])
        for name in names
        if name != SECTIONS_FIELD
    }


def section_fields(section: str, schema: Mapping[str, Any]) -> dict[str, FormField]:
    """Return the settings of an objective as ``SECTION.SETTING``.

    Args:
        section: name of the objective.
        schema: JSON schema of its settings.
    """
    required = schema.get("required", ())
    return {
        f"{section}.{name}": field_of(f"{section}.{name}", about, section, name in required)
        for name, about in schema.get("properties", {}).items()
    }


def field_of(name: str, about: Mapping[str, Any], heading: str, required: bool) -> FormField:
    """Return the field of a property of a JSON schema."""
    ways = [way for way in about.get("anyOf", [about]) if way.get("type") != "null"]
    types = {way.get("type", "string") for way in ways}
    choices = [choice for way in ways for choice in _choices(way)]
    if name in SOURCES:
        kind: FieldKind = "sources"
    elif "array" in types:
        kind = "list"
    elif "object" in types:
        kind = "mapping"
    elif types == {"boolean"}:
        kind = "switch"
    elif choices:
        kind = "choice"
    elif types & {"integer", "number"}:
        kind = "number"
    else:
        kind = "text"
    bounds = [f"{sign} {way[key]:g}" for way in ways for key, sign in BOUNDS.items() if key in way]
    plain = FormField(
        name,
        heading,
        kind,
        about.get("description", ""),
        choices=tuple(choices),
        bounds=", ".join(bounds),
        required=required,
        takes_text="string" in types,
    )
    default = about.get("default")
    if default in (None, {}, []):
        return plain
    return FormField(**{**vars(plain), "default": plain.text(default)})


def _choices(way: Mapping[str, Any]) -> list[str]:
    if "const" in way:
        return [str(way["const"])]
    return [str(choice) for choice in way.get("enum", way.get("items", {}).get("enum", ()))]
