"""Values of fields in the forms that people give them in: texts of the command line, words with commas, ranges."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from chronicals.config.lora_init import INITS, is_init


def as_shares(value: Any) -> Any:
    """A mapping as it is; ``name=share`` texts, as the command line has them, as one."""
    return dict(text.split("=", 1) for text in value) if isinstance(value, list) and all("=" in t for t in value) else value


def as_pattern(value: Any) -> Any:
    """``value``, which as a text is matched against paths of layers."""
    try:
        re.compile(value if isinstance(value, str) else "")
    except re.error as error:
        raise PydanticCustomError("pattern", "is no regular expression: {reason}", {"reason": str(error)}) from None
    return value


def as_patterns(value: dict[str, Any]) -> dict[str, Any]:
    """``value``, whose keys are such texts."""
    for key in value:
        as_pattern(key)
    return value


def as_lora_init(value: str) -> str:
    if not is_init(value):
        raise PydanticCustomError("init", "{takes}", {"takes": INITS})
    return value


def as_list(value: Any) -> Any:
    """A word, or several with commas, as the list that they are meant as."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def as_names(value: Any) -> Any:
    """The same where a text may also be a regular expression, which plain names are not meant as."""
    return as_list(value) if isinstance(value, str) and re.fullmatch(r"\w+(\s*,\s*\w+)*", value) else value


def as_numbers(value: Any) -> Any:
    """``0-7,20`` as the list of these numbers; a list of such texts and of numbers likewise."""
    parts = value if isinstance(value, list) else as_list(str(value)) if isinstance(value, (str, int)) else None
    if parts is None:
        return value
    found: list[int] = []
    for part in (word for text in parts for word in as_list(str(text))):
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise PydanticCustomError("numbers", "{part} is no number and no range as 0-7", {"part": repr(part)})
        found += range(first, last + 1)
    return sorted(set(found))


def as_tokens(value: Any) -> Any:
    """Ids and texts of tokens; digits alone, as the command line has them, are an id."""
    if isinstance(value, dict):
        return {name: as_tokens(tokens) for name, tokens in value.items()}
    listed = as_list(value) if isinstance(value, str) else [value] if isinstance(value, int) else value
    return [int(x) if isinstance(x, str) and x.isdecimal() else x for x in listed] if isinstance(listed, list) else listed


def none_as_empty(value: Any) -> Any:
    """``none``, as the command line says that there are to be none, as a list."""
    return [] if value in ("none", ["none"]) else value


def infinity_as_none(value: Any) -> Any:
    """JSON knows no infinity."""
    return None if value in (math.inf, "inf", ".inf") else value


OwnPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""``~`` is the home folder, also where no shell has seen it."""
