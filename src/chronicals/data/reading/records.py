"""Records of rows, lines that are not parsed yet, and rows that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, in the place of its record.

    Attributes:
        reason: the fault, in words.
        rule: the gate's name for it.
    """

    reason: str
    rule: str = "unparsable_line"


class Line(bytes):
    """A row as JSON, not parsed yet."""

    __slots__ = ()


Row = tuple[str, Record | BadRow]
Unparsed = tuple[str, Record | BadRow | Line]


def parsed(record: Any) -> Any:
    """Return the record of a row that may be a line."""
    if not isinstance(record, Line):
        return record
    try:
        text = record.decode().removeprefix("\ufeff")
        return encodable(json.loads(text), text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"does not parse as JSON: {error}")


def encodable(value: Any, text: str) -> Any:
    """Return ``value``, or a bad row if half of a surrogate pair is in it: no tokenizer takes one.

    Args:
        text: JSON that ``value`` was read from.
    """
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return BadRow(f"holds {error.object[error.start]!r}, half of a character beyond U+FFFF")
    return value
