"""Answers to another tool's settings, by the tables of names and values of ``config.foreign``.

The tables are those that answer an unknown field of a recipe, so a name stands in one place.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from chronicals.config import Recipe, foreign_data
from chronicals.config.foreign import (
    INSTEAD,
    NOWHERE,
    OUR_NAMES,
    SETTINGS_BY_NAME,
    SOURCE_FIELDS,
    TURNED_OFF,
)
from chronicals.config.foreign_values import ANY, BY_VALUE, OWN_VALUES, as_key

AnswerKind = Literal["mapped", "not needed", "not there", "not known"]
KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)

LEAVE_OUT = "leave it out"
"""Beginning of an answer that sets nothing."""

ELSEWHERE = re.compile(r"part of this version|not written yet|no objective here")
"""Words of a reason that says what is missing here, rather than why nothing is needed."""

ASSIGNMENT = re.compile(r"(\w+)=")

FIELDS: dict[str, Any] = Recipe.__pydantic_fields__  # type: ignore[attr-defined]

PERMITS = frozenset(
    name
    for name, field in FIELDS.items()
    if name.startswith("use_")
    and field.get_default(call_default_factory=True) is True
    and name not in ("use_sequence_packing", "use_gradient_checkpointing", "use_lora_plus")
)
"""Switches that permit what card and model decide: set, they would be demanded."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one setting: what becomes of it here.

    Attributes:
        kind: ``mapped`` to fields of ours, ``not needed`` here, ``not there`` in this version, or
            ``not known`` to the tables.
        fields: ours by name, ``dpo.beta`` for a setting of an objective.
        reason: why nothing is needed, what is missing, or how the values were computed.
    """

    kind: AnswerKind
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""


def mapped(reason: str = "", **fields: Any) -> Answer:
    """Return the answer that sets fields."""
    return Answer("mapped", fields, reason)


def not_needed(reason: str) -> Answer:
    """Return the answer that sets nothing, because nothing is needed."""
    return Answer("not needed", reason=reason)


def not_there(reason: str) -> Answer:
    """Return the answer that sets nothing, because this version does not have it."""
    return Answer("not there", reason=reason)


def from_tables(name: str, value: Any, objective: str) -> Answer:
    """Return the answer of the tables to a setting.

    Args:
        name: of the setting.
        value: its value.
        objective: ours, whose section a setting of a loss goes to.
    """
    if name in BY_VALUE:
        by_value = BY_VALUE[name]
        text = by_value.get(as_key(value))
        if text is not None:
            return _in_words(text, value)
        if ANY in by_value:
            text = by_value[ANY]
            computed = "VALUE" in text or text.startswith(LEAVE_OUT)
            return _in_words(text, value) if computed else not_there(f"{value!r}: {text}")
    if name in FIELDS:
        return _ours(name, value)
    if name in SETTINGS_BY_NAME:
        for ours in SETTINGS_BY_NAME[name]:
            if ours.partition(".")[0] == objective:
                return Answer("mapped", {ours: value})
        if name not in OUR_NAMES and name not in NOWHERE:
            return not_needed(f"objective {objective!r} has no such setting")
    if name in OUR_NAMES:
        return _renamed(name, OUR_NAMES[name], value)
    if name in INSTEAD:
        if value is False:
            return _in_words(TURNED_OFF.get(name, f"{LEAVE_OUT}: it is off"), value)
        return _in_words(INSTEAD[name], value)
    if name in NOWHERE:
        return _in_words(f"{LEAVE_OUT}: {NOWHERE[name]}", value)
    if name in BY_VALUE:
        return not_there(f"{value!r} has no counterpart")
    return Answer("not known", reason="no table has this name")


def _renamed(name: str, ours: str, value: Any) -> Answer:
    """Return the answer to a field that has another name here and the same values."""
    if ours in ("data", "validation_data"):
        value, beside = foreign_data.converted(value, SOURCE_FIELDS)
        return mapped(**{ours: value}, **beside)
    return _ours(ours, value)


def _ours(name: str, value: Any) -> Answer:
    """Return the answer that sets one of our fields to a value of theirs."""
    text = OWN_VALUES.get(name, {}).get(as_key(value))
    if text is not None:
        return _in_words(text, value)
    if name in PERMITS and value is True:
        return not_needed("it is on wherever card and model allow it")
    return mapped(**{name: value})


def _in_words(text: str, value: Any) -> Answer:
    """Return the answer that a text of the tables gives.

    It is ``NAME=LITERAL and NAME=LITERAL, remark``, or ``leave it out: reason``.
    """
    if text.startswith(LEAVE_OUT):
        reason = text.removeprefix(LEAVE_OUT).lstrip(":, ") or "it is off, as here"
        return not_there(reason) if ELSEWHERE.search(reason) else not_needed(reason)
    if ELSEWHERE.search(text):
        return not_there(f"{value!r}: {text}")
    fields: dict[str, Any] = {}
    rest = text
    while name := ASSIGNMENT.match(rest):
        literal, rest = _literal(rest[name.end() :])
        given = _with_value(literal, value)
        if isinstance(given, dict) and name[1] not in FIELDS:
            fields |= {f"{name[1]}.{setting}": one for setting, one in given.items()}
        elif name[1] in FIELDS:
            fields[name[1]] = given
        else:
            return not_needed(text)  # an option of the command
        if not ASSIGNMENT.match(rest.removeprefix(" and ")):
            break
        rest = rest.removeprefix(" and ")
    if not fields:
        return not_there(f"set it by hand: {text}")
    return mapped(rest.lstrip(",; "), **fields)


def _literal(text: str) -> tuple[Any, str]:
    """Return the literal of Python, or the word, that a text begins with, and what follows it."""
    for end in range(1, len(text) + 1):
        if end < len(text) and text[end] not in " ,;":
            continue
        try:
            return ast.literal_eval(text[:end]), text[end:]
        except (SyntaxError, ValueError):
            continue
    word = re.match(r"\w+", text)
    assert word is not None, text
    return word[0], text[word.end() :]


def _with_value(literal: Any, value: Any) -> Any:
    """Return ``literal`` with the user's value in the place of ``VALUE``."""
    if isinstance(literal, dict):
        return {name: _with_value(one, value) for name, one in literal.items()}
    return value if literal == "VALUE" else literal
