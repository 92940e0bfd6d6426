"""What goes between the process that builds a store and those that tokenise for it: chunks there,
documents back.

A frame is two lengths (uint64), a header in JSON, and bytes: rows as JSON one behind the other, or
arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

import numpy as np

from chronicals.data.kinds.messages import holds_media
from chronicals.data.making.chunks import Chunk, Encoded
from chronicals.data.making.documents import Documents
from chronicals.data.reading.gate import DataReport
from chronicals.data.reading.records import BadRow, Line
from chronicals.data.reading.row_fields import MEDIA_FIELDS, READ_FIELDS

Frame = tuple[dict[str, Any], bytes]


def write_frame(stream: IO[bytes], header: Mapping[str, Any], body: bytes = b"") -> None:
    described = json.dumps(header).encode()
    stream.write(np.array([len(described), len(body)], np.uint64).tobytes())
    stream.write(described)
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Frame | None:
    """None at the end.

    Raises:
        EOFError: the end came within a frame.
    """
    lengths = stream.read(16)
    if not lengths:
        return None
    if len(lengths) < 16:
        raise EOFError(f"{len(lengths)} of 16 bytes")
    header, body = (_exactly(stream, int(length)) for length in np.frombuffer(lengths, np.uint64))
    return json.loads(header), body


def _exactly(stream: IO[bytes], length: int) -> bytes:
    found = stream.read(length)
    if len(found) < length:
        raise EOFError(f"{len(found)} of {length} bytes")
    return found


def frame_of_chunk(chunk: Chunk) -> Frame | None:
    """Its rows without the fields that nobody reads; None where one holds what JSON has no word
    for.
    """
    records = [*chunk.earlier, *chunk.records]
    try:
        lines = [_line(record) for record in records]
    except (TypeError, ValueError, RecursionError):  # half of a surrogate pair is a ValueError, too
        return None
    bad = {n: [row.reason, row.rule] for n, row in enumerate(records) if isinstance(row, BadRow)}
    header = {
        "first": chunk.first,
        "wheres": chunk.wheres,
        "lengths": [*map(len, lines)],
        "bad": bad,
    }
    header["earlier"] = len(chunk.earlier)
    return header, b"".join(lines)


def _line(record: Any) -> bytes:
    if isinstance(record, Line):
        return record
    if isinstance(record, BadRow):
        return b""
    if not isinstance(record, Mapping) or not all(isinstance(name, str) for name in record):
        raise TypeError("no object")
    read = {
        name: value if name in READ_FIELDS or value is None else _sign_of(name, value)
        for name, value in record.items()
    }
    if any(isinstance(value, tuple) for value in read.values()):
        raise TypeError("a tuple would come back as a list")
    return json.dumps(read, ensure_ascii=False).encode()


def _sign_of(name: str, value: Any) -> int:
    """Return 1 for pictures and sound, which are refused, and 0 for whatever else nobody reads."""
    return int(name in MEDIA_FIELDS and holds_media(value))


def chunk_of_frame(header: Mapping[str, Any], body: bytes) -> Chunk:
    records = list[Any]()
    end = 0
    for length in header["lengths"]:
        records.append(Line(body[end : end + length]))
        end += length
    for number, fault in header["bad"].items():
        records[int(number)] = BadRow(*fault)
    earlier = header["earlier"]
    return Chunk(header["first"], header["wheres"], records[earlier:], earlier=records[:earlier])


def frame_of_encoded(encoded: Encoded) -> Frame:
    documents = encoded.documents
    arrays = [
        documents.offsets,
        documents.rows,
        documents.sides,
        documents.shared,
        documents.labels,
    ]
    arrays += [encoded.hashes, documents.ids, documents.trained, encoded.row_kinds]
    header = {
        "documents": len(documents),
        "tokens": len(documents.ids),
        "report": asdict(encoded.report),
    }
    return header, b"".join(array.tobytes() for array in arrays)


def encoded_of_frame(header: Mapping[str, Any], body: bytes) -> Encoded:
    documents = header["documents"]
    tokens = header["tokens"]
    numbers = (np.int64, documents + 1), *[(np.int64, documents)] * 4, (np.uint64, documents)
    kinds = *numbers, (np.int32, tokens), (np.uint8, tokens), (np.int8, documents)
    arrays = []
    begin = 0
    for kind, count in kinds:
        arrays.append(np.frombuffer(body, kind, count, begin))
        begin += arrays[-1].nbytes
    offsets, rows, sides, shared, labels, hashes, ids, trained, row_kinds = arrays
    found = Documents(ids, trained, offsets, rows, sides, shared, labels)
    return Encoded(found, hashes, row_kinds, DataReport.from_dict(header["report"]))
