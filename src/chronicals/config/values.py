"""Values of fields in the forms that users write.

These are texts of the command line, words with commas, ranges, paths, and names of initialisations.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from chronicals.config.foreign import own_value

OPENING = "([{"
CLOSING = ")]}"
"""Brackets within which a comma belongs to the value, as in the regular expression ``a{1,2}``."""


def split_values(text: str) -> list[str]:
    r"""Return the values of a list that is given as one text: those between its commas.

    A comma that is part of a value stands within brackets (``a{1,2}``) or behind a backslash
    (``\,``, which is read as a comma). A text whose brackets do not match is divided at all of its
    commas but those.

    Raises:
        PydanticCustomError: there is nothing between two commas, or before or after one.
    """
    # Whether every bracket outside of escapes is closed, and by its own kind.
    opened: list[str] = []
    for character in re.sub(r"\\.", "", text):
        if character in OPENING:
            opened.append(CLOSING[OPENING.index(character)])
        elif character in CLOSING and (not opened or opened.pop() != character):
            closed = False
            break
    else:
        closed = not opened
    parts = [""]
    depth = 0
    characters = iter(text)
    for character in characters:
        if character == "\\":
            following = next(characters, "")
            parts[-1] += following if following == "," else character + following
            continue
        if character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
        if closed:
            depth += (character in OPENING) - (character in CLOSING)
    if len(parts) == 1:
        return [parts[0].strip() or parts[0]]
    if not all(part.strip() for part in parts):
        raise PydanticCustomError(
            "list",
            "an empty entry beside a comma; leave out the comma, or write one that is part of a "
            "value as \\,",
        )
    return [part.strip() for part in parts]


def as_one_value(value: str) -> str:
    """Return a text that ``split_values`` reads as this one value."""
    try:
        if split_values(value) == [value]:
            return value
    except PydanticCustomError:
        pass
    return value.replace(",", "\\,")


def as_value_list(value: Any) -> Any:
    """Return a text as the list it represents; a list keeps its values."""
    return split_values(value) if isinstance(value, str) else value


def as_shares(value: Any) -> Any:
    """Return a mapping as it is, and ``name=share`` texts of the command line as a mapping."""
    texts = as_value_list(value)
    if not isinstance(texts, list):
        return value
    shares = dict[str, str]()
    for text in texts:
        # The last sign counts: a pattern may contain others.
        name, sign, share = (part.strip() for part in str(text).rpartition("="))
        if not (sign and name and share):
            raise PydanticCustomError("shares", "{text} is not NAME=VALUE", {"text": repr(text)})
        if name in shares:
            raise PydanticCustomError("shares", "{name} is named twice", {"name": repr(name)})
        shares[name] = share
    return shares


def as_dimensions(value: Any) -> Any:
    """Return a mapping as it is, and ``name=values`` texts of the command line as a mapping.

    Values are read as YAML: ``learning_rate=[1e-5, 1e-3, log]``.
    """
    texts = as_value_list(value)
    if not isinstance(texts, list):
        return value
    dimensions = dict[str, Any]()
    for text in texts:
        name, sign, values = (part.strip() for part in str(text).partition("="))
        try:
            dimensions[name] = yaml.safe_load(values)
        except yaml.YAMLError:
            sign = ""
        if not (sign and name and values):
            raise PydanticCustomError(
                "dimensions",
                "{text} is not NAME=[VALUE, VALUE], nor NAME=[LOW, HIGH, log]",
                {"text": repr(text)},
            )
    return dimensions


def as_pattern(value: Any) -> Any:
    """Return ``value``, which must be a regular expression if it is a text.

    It is matched with paths of layers.
    """
    try:
        re.compile(value if isinstance(value, str) else "")
    except re.error as error:
        raise PydanticCustomError(
            "pattern", "is no regular expression: {reason}", {"reason": str(error)}
        ) from None
    return value


def as_patterns(value: dict[str, Any]) -> dict[str, Any]:
    """Return ``value``, whose keys must be regular expressions."""
    for key in value:
        as_pattern(key)
    return value


INITS = (
    "takes default, gaussian, pissa, pissa_niter_N (N iterations, such as pissa_niter_16), "
    "olora or loftq"
)
"""The initialisations of adapters, in words."""


def is_init(name: str) -> bool:
    """Return whether this names an initialisation of adapters."""
    pattern = r"default|gaussian|olora|loftq|pissa(_niter_[1-9][0-9]*)?"
    return re.fullmatch(pattern, name) is not None


def as_lora_init(value: str) -> str:
    """Return ``value``, which must be the name of an initialisation."""
    if not is_init(value):
        raise PydanticCustomError("init", "{takes}", {"takes": INITS})
    return value


LAYER_NAME = re.compile(r"\w+(\.\w+)*")
"""A layer, or the end of its path: ``q_proj``, ``self_attn.q_proj``."""


def as_names(value: Any) -> Any:
    """Return a text with several values, or with one name, as a list.

    Another text, a regular expression, is returned as it is.
    """
    if not isinstance(value, str):
        return value
    names = split_values(value)
    return names if len(names) > 1 or LAYER_NAME.fullmatch(names[0]) else names[0]


def as_numbers(value: Any) -> Any:
    """Return ``0-7,20``, or a list of such texts and of numbers, as a sorted list of numbers."""
    if not isinstance(value, (list, str, int)):
        return value
    parts: list[str] = []
    for text in value if isinstance(value, list) else [value]:
        parts += split_values(str(text))
    numbers = set[int]()
    for part in parts:
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not span:
            raise PydanticCustomError(
                "numbers", "{part} is no number and no range as 0-7", {"part": repr(part)}
            )
        numbers.update(span)
    return sorted(numbers)


def as_tokens(value: Any) -> Any:
    """Return tokens as a list of ids and texts.

    Digits alone, as the command line has them, are an id.
    """
    if isinstance(value, dict):
        return {name: as_tokens(tokens) for name, tokens in value.items()}
    if isinstance(value, str):
        value = split_values(value)
    elif isinstance(value, int):
        value = [value]
    if not isinstance(value, list):
        return value
    return [int(x) if isinstance(x, str) and x.isdecimal() else x for x in value]


FOREIGN = "foreign"
"""Kind of an error about another trainer's value, which says what to write instead."""


def not_foreign(name: str) -> Callable[[Any], Any]:
    """Return a validator that refuses another trainer's values.

    It is for a field that would take them as names.
    """

    def validated(value: Any) -> Any:
        meant = own_value(name, value)
        if meant is not None:
            raise PydanticCustomError(FOREIGN, "not taken here; {meant}", {"meant": meant})
        return value

    return validated


def none_as_empty(value: Any) -> Any:
    """Return ``none``, by which the command line asks for an empty list, as one."""
    return [] if value in ("none", ["none"]) else value


def infinity_as_none(value: Any) -> Any:
    """Return infinity as None, because JSON has no infinity."""
    return None if value in (math.inf, "inf", ".inf") else value


BYTES_OF_UNITS = {
    "MB": 10**6,
    "MIB": 2**20,
    "GB": 10**9,
    "GIB": 2**30,
    "TB": 10**12,
    "TIB": 2**40,
}
"""Bytes of a unit of memory, whose name may have small letters."""

MOST_GIGABYTES = 10_000.0
"""Largest memory of a card, 10 TB: more is a mistake in the unit."""


def as_gigabytes(value: Any) -> Any:
    """Return a size as a number of GB: a plain number is one, a text may have a unit (``16GiB``).

    Raises:
        PydanticCustomError: the text is no size, or the size is not above 0 and up to 10 TB.
    """
    if value is None or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    match = re.fullmatch(
        r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(value), re.I
    )
    if match is None:
        raise PydanticCustomError("size", "is no size; give GB as 24, or a unit as in 16GiB")
    unit = match[2].upper() or "GB"
    if unit not in BYTES_OF_UNITS:
        raise PydanticCustomError(
            "size",
            "the unit {unit} is not known; take GB, GiB, MB, MiB, TB or TiB",
            {"unit": match[2]},
        )
    size = float(match[1]) * BYTES_OF_UNITS[unit] / BYTES_OF_UNITS["GB"]
    if not 0 < size <= MOST_GIGABYTES:
        raise PydanticCustomError("size", "is not above 0 and at most 10 TB; give GB, as 24")
    return size


def off_as_text(value: Any) -> Any:
    """Return ``off``, which YAML 1.1 reads as false, as the text that it was."""
    return "off" if value is False else value


OwnPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""A path in which ``~`` is the home folder, also if no shell has replaced it."""


def exists_here(name: str) -> bool:
    """Return whether a file or a folder here has this name, or this pattern."""
    path = os.path.expanduser(name)
    return os.path.exists(path) or (glob.has_magic(path) and bool(glob.glob(path, recursive=True)))


def lasting(name: str | Path) -> str:
    """Return the absolute path if ``name`` is a path or pattern that exists here.

    Any other name, such as a hub name, is returned unchanged.
    """
    text = str(name)
    return os.path.abspath(os.path.expanduser(text)) if exists_here(text) else text
