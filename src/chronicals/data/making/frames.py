"""Messages between the process that builds a store and those that tokenise for it.

Chunks go there, documents come back. A frame is two lengths (uint64), a header in JSON, and a body:
rows as JSON one behind the other, or arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

import numpy as np

from chronicals.data.kinds.messages import holds_media
from chronicals.data.making.chunks import Chunk
from chronicals.data.making.documents import FlatDocuments
from chronicals.data.making.encoding import Encoded
from chronicals.data.reading.gate import DataReport
from chronicals.data.reading.records import BadRow, Line
from chronicals.data.reading.row_fields import MEDIA_FIELDS, READ_FIELDS

Frame = tuple[dict[str, Any], bytes]
"""Header and body."""


def write_frame(stream: IO[bytes], header: Mapping[str, Any], body: bytes = b"") -> None:
    """Write a frame and flush it."""
    described = json.dumps(header).encode()
    stream.write(np.array([len(described), len(body)], np.uint64).tobytes())
    stream.write(described)
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Frame | None:
    """Return the next frame; None at the end.

    Raises:
        EOFError: the stream ends within a frame.
    """
    lengths = stream.read(16)
    if not lengths:
        return None
    if len(lengths) < 16:
        raise EOFError(f"{len(lengths)} of 16 bytes")
    parts = []
    for length in np.frombuffer(lengths, np.uint64).tolist():
        part = stream.read(length)
        if len(part) < length:
            raise EOFError(f"{len(part)} of {length} bytes")
        parts.append(part)
    header, body = parts
    return json.loads(header), body


def frame_of_chunk(chunk: Chunk) -> Frame | None:
    """Return a chunk's rows without the fields that nobody reads.

    None if a row holds what JSON has no form for: this process then tokenises the chunk itself.
    """
    records = [*chunk.earlier, *chunk.records]
    try:
        lines = [_line(record) for record in records]
    except (TypeError, ValueError, RecursionError):  # half of a surrogate pair is a ValueError, too
        return None
    bad = {n: [row.reason, row.rule] for n, row in enumerate(records) if isinstance(row, BadRow)}
    header = {
        "first": chunk.first,
        "places": chunk.places,
        "lengths": [*map(len, lines)],
        "bad": bad,
        "earlier": len(chunk.earlier),
    }
    return header, b"".join(lines)


def _line(record: Any) -> bytes:
    """Return a record as JSON.

    Raises:
        TypeError: JSON would not give the same record back.
    """
    if isinstance(record, Line):
        return record
    if isinstance(record, BadRow):
        return b""
    if not isinstance(record, Mapping) or not all(isinstance(name, str) for name in record):
        raise TypeError("no object")
    fields = {}
    for name, value in record.items():
        if name in READ_FIELDS or value is None:
            fields[name] = value
        else:
            # 1 for pictures and sound, which the other process refuses, 0 for what nobody reads
            fields[name] = int(name in MEDIA_FIELDS and holds_media(value))
    if any(isinstance(value, tuple) for value in fields.values()):
        raise TypeError("a tuple would come back as a list")
    return json.dumps(fields, ensure_ascii=False).encode()


def chunk_of_frame(header: Mapping[str, Any], body: bytes) -> Chunk:
    """Return the chunk that ``frame_of_chunk`` wrote."""
    records = list[Any]()
    end = 0
    for length in header["lengths"]:
        records.append(Line(body[end : end + length]))
        end += length
    for number, fault in header["bad"].items():
        records[int(number)] = BadRow(*fault)
    earlier = header["earlier"]
    return Chunk(header["first"], header["places"], records[earlier:], earlier=records[:earlier])


def frame_of_encoded(encoded: Encoded) -> Frame:
    """Return the documents of a chunk as a frame."""
    documents = encoded.documents
    arrays = [
        documents.offsets,
        documents.rows,
        documents.sides,
        documents.shared,
        documents.labels,
        encoded.hashes,
        documents.ids,
        documents.trained,
        encoded.row_kinds,
    ]
    header = {
        "documents": len(documents),
        "tokens": len(documents.ids),
        "report": asdict(encoded.report),
    }
    return header, b"".join(array.tobytes() for array in arrays)


def encoded_of_frame(header: Mapping[str, Any], body: bytes) -> Encoded:
    """Return the documents that ``frame_of_encoded`` wrote, as views of ``body``."""
    documents = header["documents"]
    tokens = header["tokens"]
    contents = (
        (np.int64, documents + 1),
        *[(np.int64, documents)] * 4,
        (np.uint64, documents),
        (np.int32, tokens),
        (np.uint8, tokens),
        (np.int8, documents),
    )
    arrays = []
    begin = 0
    for dtype, count in contents:
        arrays.append(np.frombuffer(body, dtype, count, begin))
        begin += arrays[-1].nbytes
    offsets, rows, sides, shared, labels, hashes, ids, trained, row_kinds = arrays
    return Encoded(
        FlatDocuments(ids, trained, offsets, rows, sides, shared, labels),
        hashes,
        row_kinds,
        DataReport.from_dict(header["report"]),
    )
