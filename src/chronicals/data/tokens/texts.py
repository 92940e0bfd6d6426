"""Plain texts before and after tokenisation: checked, with one beginning and no end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from chronicals.data.reading.gate import DataError

_Ids = TypeVar("_Ids", Sequence[int], list[int], np.ndarray)


def check_text(value: Any, name: str, where: str) -> str:
    """Return ``value``, which must be text that a tokenizer takes.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, this is {type(value).__name__}")
    if not is_unicode(value):
        raise DataError(f"{where}: {name} holds half of a surrogate pair, which is no text")
    return value


def is_unicode(text: str) -> bool:
    """Return whether the text is free of halves of surrogate pairs, which JSON may bring."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_double_beginning(ids: _Ids, beginning: int | None) -> _Ids:
    """Return ids with one beginning of text, also if the text brought one of its own."""
    doubled = beginning is not None and len(ids) > 1 and ids[0] == ids[1] == beginning
    return ids[1:] if doubled else ids


def closed(ids: list[int], beginning: int | None, end: int | None) -> list[int]:
    """Return the same list, changed to have one beginning and one end of text."""
    if beginning is not None and ids[:2] == [beginning, beginning]:
        del ids[0]
    while ids and ids[-1] == end:
        ids.pop()
    if end is not None:
        ids.append(end)
    return ids


def without_end(ids: _Ids, end: int | None) -> _Ids:
    """Return the ids without the ends of text that close them."""
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return ids[:length]
