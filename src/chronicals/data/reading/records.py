"""Rows as they are read: names of their fields, rows that cannot be read, and chunks of rows.

Sources rename columns to the names here; ``chronicals.data.kinds`` reads the fields. A chunk is
recognised, tokenised and checked at once, in any process.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

CONVERSATION_FIELDS = ("messages", "conversations")
"""Fields that hold a list of messages."""

PROMPT_COMPLETION_PAIRS = (
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)
"""Other names of ``prompt`` and ``completion``."""

KIND_FIELDS: list[tuple[str, frozenset[str]]] = [
    ("chat", frozenset({"messages"})),
    ("chat", frozenset({"conversations"})),
    ("unpaired preference", frozenset({"prompt", "completion", "label"})),
    ("completion", frozenset({"prompt", "completion"})),
    ("unpaired preference", frozenset({"prompt", "response", "label"})),
    ("completion", frozenset({"prompt", "response"})),
    ("instruction", frozenset({"instruction", "output"})),
    ("instruction", frozenset({"instruction", "response"})),
    ("preference", frozenset({"chosen", "rejected"})),
    ("preference", frozenset({"prompt", "responses", "scores"})),
    ("tokens", frozenset({"input_ids"})),
    ("text", frozenset({"text"})),
    ("prompt", frozenset({"prompt"})),
    *(("completion", frozenset(pair)) for pair in PROMPT_COMPLETION_PAIRS[1:]),
]
"""The kinds of row and the fields that identify them, in the order in which they are tried."""

REQUESTED_KIND_FIELDS = [
    *KIND_FIELDS,
    ("preference", frozenset({"responses", "scores"})),
    ("prompt", frozenset({"messages"})),
    *(
        ("unpaired preference", frozenset({answer, "label"}))
        for answer in ("completion", "response", "output", "answer", *CONVERSATION_FIELDS)
    ),
]
"""The same for kinds that an objective asks for; others ignore a chat's ``label``."""

ALL_KIND_FIELDS = frozenset().union(*(fields for _, fields in REQUESTED_KIND_FIELDS))
"""Every field that may identify a kind."""

IDENTIFYING_FIELDS = frozenset().union(*(fields for _, fields in KIND_FIELDS)) - frozenset().union(
    *PROMPT_COMPLETION_PAIRS[1:]
) | {"output", "response"}
"""Every field that identifies a kind before other names of prompt and completion are tried."""

TOKEN_FIELDS = ("input_ids", "labels", "attention_mask")
"""Fields of a row of tokens."""

MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
"""Fields of pictures and sound, which are refused."""

TEMPLATE_FIELDS = ("system", "tools", "history")
"""Fields that only the chat template has a place for."""

READ_FIELDS = (
    IDENTIFYING_FIELDS
    | frozenset().union(*PROMPT_COMPLETION_PAIRS)
    | {*TEMPLATE_FIELDS, *TOKEN_FIELDS}
)
"""Every field that is read."""

CHUNK_ROWS = 512
CHUNK_LETTERS = 1 << 22
"""Limits of a chunk: rows, and letters (or given token ids)."""

RowRecord = Mapping[str, Any]


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


PlacedRow = tuple[str, RowRecord | BadRow]
Unparsed = tuple[str, RowRecord | BadRow | Line]


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
        value: what was read.
        text: JSON that ``value`` was read from.
    """
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return BadRow(f"holds {error.object[error.start]!r}, half of a character beyond U+FFFF")
    return value


@dataclass(frozen=True)
class RowChunk:
    """Rows that follow each other, as they were read.

    Attributes:
        first: number of the first row, from 0 in reading order.
        places: where each row was read, as errors call it.
        records: the rows.
        letters: letters in all rows, about.
        earlier: the last rows that were read before the first.
    """

    first: int
    places: list[str] = field(default_factory=list)
    records: list[RowRecord | BadRow | Line] = field(default_factory=list)
    letters: int = 0
    earlier: list[RowRecord | BadRow | Line] = field(default_factory=list)


def chunks_of(rows: Iterable[Unparsed], earlier: int = 0) -> Iterator[RowChunk]:
    """Yield the rows in chunks.

    Args:
        rows: with their places, in reading order.
        earlier: how many rows before its first a chunk holds.
    """
    first = 0
    letters = 0
    places = list[str]()
    records = list[RowRecord | BadRow | Line]()
    before = deque[RowRecord | BadRow | Line](maxlen=earlier)
    for place, record in rows:
        places.append(place)
        records.append(record)
        letters += _letters(record)
        if len(records) == CHUNK_ROWS or letters >= CHUNK_LETTERS:
            yield RowChunk(first, places, records, letters, [*before])
            before.extend(records)
            first += len(records)
            letters = 0
            places = []
            records = []
    if records:
        yield RowChunk(first, places, records, letters, [*before])


def _letters(value: Any) -> int:
    """Return the letters of a record, or the numbers where it holds numbers."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_letters, value.values()))
    if isinstance(value, (list, tuple)):
        holds_numbers = not value or isinstance(value[0], Number)
        return len(value) if holds_numbers else sum(map(_letters, value))
    return math.prod(getattr(value, "shape", ()))
