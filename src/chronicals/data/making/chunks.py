"""Chunks of rows: what is recognised, tokenised and checked at once, in any process."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

from chronicals.data.reading.records import BadRow, Line, Record, Unparsed

CHUNK_ROWS = 512
CHUNK_LETTERS = 1 << 22
"""Limits of a chunk: rows, and letters (or given token ids)."""


@dataclass(frozen=True)
class Chunk:
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
    records: list[Record | BadRow | Line] = field(default_factory=list)
    letters: int = 0
    earlier: list[Record | BadRow | Line] = field(default_factory=list)


def chunks_of(rows: Iterable[Unparsed], earlier: int = 0) -> Iterator[Chunk]:
    """Yield the rows in chunks.

    Args:
        earlier: how many rows before its first a chunk holds.
    """
    first = 0
    letters = 0
    places = list[str]()
    records = list[Record | BadRow | Line]()
    before = deque[Record | BadRow | Line](maxlen=earlier)
    for place, record in rows:
        places.append(place)
        records.append(record)
        letters += _letters(record)
        if len(records) == CHUNK_ROWS or letters >= CHUNK_LETTERS:
            yield Chunk(first, places, records, letters, [*before])
            before.extend(records)
            first += len(records)
            letters = 0
            places = []
            records = []
    if records:
        yield Chunk(first, places, records, letters, [*before])


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
