"""Formats of files: each is a function from a path to rows with their places.

Memory does not grow with the file. A row that cannot be read is handed on as ``BadRow``; a file
that cannot be read raises ``DataError``.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chronicals.data.reading.gate import DataError
from chronicals.data.reading.nulls import cleaner
from chronicals.data.reading.records import (
    BadRow,
    Line,
    PlacedRow,
    RowRecord,
    Unparsed,
    encodable,
    parsed,
)

COLUMNAR_ROWS_AT_ONCE = 1024
"""Rows of a columnar file that are made Python objects together."""

JSON_WINDOW = 1 << 20
"""Characters of a JSON text that are read at once; more if a single row is longer."""

MAX_TEXT_ROW = 1 << 22
"""Characters of a text file that are one row, more than most books have.

A longer file is several rows.
"""

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Compressions by the ending of a file's name."""

Reader = Callable[[Path], Iterator[Unparsed]]


def read_file(path: Path) -> Iterator[Unparsed]:
    """Yield the rows of a file, each with its place; lines of JSON unparsed, for ``parsed``.

    Raises:
        DataError: there is no such file, its name has no known ending, or it cannot be read in the
            format that the name says.
    """
    reader = reader_of(path)
    if reader is None:
        raise DataError(
            f"{path}: files ending in {path.suffix!r} cannot be read; give {', '.join(READERS)}"
        )
    try:
        yield from reader(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        fault = error.reason
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as in_line:
                    fault = f"{in_line.reason}, byte {in_line.start} of line {number}"
                    break
        raise DataError(f"{path}: not UTF-8 text ({fault}); save it as UTF-8") from error
    except (OSError, pa.ArrowException, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: cannot be read ({reason}); it may be damaged or only partly copied"
        ) from error


def reader_of(path: Path) -> Reader | None:
    """Return the function that reads a file of this name; None if there is none."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        inner = path.with_suffix("").suffix.lower()
        return None if inner in COLUMNAR else READERS.get(inner)
    return READERS.get(suffix)


def is_text(path: Path) -> bool:
    """Return whether the file is one text, not rows."""
    return reader_of(path) is _read_text


def _open(path: Path) -> io.BufferedReader:
    """Open the bytes of a file, decompressed."""
    codec = COMPRESSED.get(path.suffix.lower())
    raw: Any = pa.CompressedInputStream(str(path), codec) if codec else path.open("rb", buffering=0)
    stream = io.BufferedReader(raw, 1 << 18)
    if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{path}: is UTF-16; save it as UTF-8")
    return stream


def _open_text(path: Path, newline: str | None = "") -> io.TextIOWrapper:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline=newline)


def _read_text(path: Path) -> Iterator[PlacedRow]:
    """Yield a whole text, or parts of a long one, which end with a paragraph, a line or a word."""
    with _open_text(path, newline=None) as stream:
        text = stream.read(MAX_TEXT_ROW + 1)
        place = f"{path}"
        lines = 0
        while len(text) > MAX_TEXT_ROW:
            end = MAX_TEXT_ROW
            for separator in ("\n\n", "\n", " "):
                # in the second half of the part only, so that parts are not too short
                found = text.rfind(separator, MAX_TEXT_ROW // 2, MAX_TEXT_ROW)
                if found >= 0:
                    end = found + len(separator)
                    break
            yield f"{path}:{lines + 1}", {"text": text[:end]}
            lines += text.count("\n", 0, end)
            text = text[end:] + stream.read(end)
            place = f"{path}:{lines + 1}"
        yield place, {"text": text}


def _read_json_lines(path: Path) -> Iterator[Unparsed]:
    name = str(path)
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{name}:{number}", Line(line)


def _read_json(path: Path) -> Iterator[Unparsed]:
    """Yield the rows of an array of objects, or of an object that holds one.

    Many a ``.json`` file holds objects line by line; these are read, too.
    """
    with _open_text(path) as stream:
        window = _JsonWindow(path, stream)
        first = window.next()
        if first == "{" and window.begins_with_a_line():
            yield from _read_json_lines(path)
            return
        if first not in ("[", "{"):
            raise window.fault("expected an array of objects, or an object that holds one")
        values = _elements(window) if first == "[" else _elements_within(window)
        for number, value in enumerate(values, 1):
            yield f"{path}: row {number}", value
        if window.next():
            raise window.fault(
                "something follows the end of the text; objects line by line belong in .jsonl"
            )


def _elements(window: _JsonWindow) -> Iterator[Any]:
    """Yield the values of the array that begins here."""
    window.take("[")
    if window.next() == "]":
        window.take("]")
        return
    while True:
        yield window.value()
        if window.take(",", "]") == "]":
            return


def _elements_within(window: _JsonWindow) -> Iterator[Any]:
    """Yield the values of the one array of objects in the object that begins here.

    Its other fields are passed over.
    """
    rows_of = None
    window.take("{")
    more = window.next() != "}"
    while more:
        name = window.value()
        window.take(":")
        if window.next() != "[":
            window.value()
        else:
            values = _elements(window)
            first = next(values, None)
            if isinstance(first, (Mapping, BadRow)):
                if name in ("messages", "conversations"):
                    raise DataError(
                        f"{window.path}: is one conversation; put it into an array, [ … ], or "
                        "write .jsonl"
                    )
                if rows_of is not None:
                    raise DataError(
                        f"{window.path}: holds two arrays of objects, {rows_of!r} and {name!r}; "
                        "write one a file"
                    )
                rows_of = name
                yield first
                yield from values
            for _ in values:
                pass
        more = window.take(",", "}") == ","
    if rows_of is None:
        raise DataError(
            f"{window.path}: holds no array of objects; write one, or a row a line in .jsonl"
        )


class _JsonWindow:
    """The part of a JSON text that is in memory, and how far it has been read.

    ijson takes 20 % less time, but names no line, refuses NaN and integers over 64 bits, turns half
    of a surrogate pair into "?", and does not return from an array nested 100,000 deep. pyarrow
    reads objects line by line only.
    """

    _decoder = json.JSONDecoder()
    _space = re.compile(r"[ \t\n\r]*")

    def __init__(self, path: Path, stream: io.TextIOWrapper):
        self.path = path
        self._stream = stream
        self._text = ""
        self._at = 0
        self._lines = 0
        self._ended = False

    def next(self) -> str:
        """Return the next character that is no white space, without taking it; empty at the end."""
        while True:
            self._at = self._space.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_on()

    def take(self, *expected: str) -> str:
        """Take the next character, which must be one of ``expected``."""
        character = self.next()
        if character not in expected:
            raise self.fault(f"expected {' or '.join(map(repr, expected))}, found {character!r}")
        self._at += 1
        return character

    def value(self) -> Any:
        """Take the next value, whole."""
        self.next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # A text that is right and only ends too early has an open string, or an error at
                # its very end, within the longest word.
                at_end = error.pos >= len(error.doc) - len("-Infinity")
                is_cut = at_end or error.msg.startswith("Unterminated string")
                if self._ended or not is_cut:
                    raise self.fault(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self.fault(str(error)) from error
            else:
                # A number may go on behind the window: 1e-7 may be cut after 1, 1e or 1e-.
                if self._ended or end + 2 < len(self._text):
                    text = self._text[self._at : end]
                    self._at = end
                    return encodable(value, text)
            self._read_on()

    def begins_with_a_line(self) -> bool:
        """Return whether an object ends with its line, and something follows."""
        line, _, rest = self._text[self._at :].partition("\n")
        return bool(rest.strip()) and isinstance(parsed(Line(line.encode())), Mapping)

    def fault(self, reason: str, position: int | None = None) -> DataError:
        """Return an error that names the line of ``position``, by default the present one."""
        end = self._at if position is None else position
        line = 1 + self._lines + self._text.count("\n", 0, end)
        return DataError(f"{self.path}:{line}: does not parse as JSON: {reason}")

    def _read_on(self) -> None:
        """Drop what was read, and read on."""
        self._lines += self._text.count("\n", 0, self._at)
        rest = self._text[self._at :]
        # As much again as is left, so that a long row is not scanned too often.
        more = self._stream.read(max(JSON_WINDOW, len(rest)))
        self._text = rest + more
        self._at = 0
        self._ended = not more


def _read_separated(path: Path, separator: str) -> Iterator[PlacedRow]:
    """Yield the rows behind a header; values are text, and may hold newlines inside quotes."""
    csv.field_size_limit(2**31 - 1)  # the module refuses fields over 128 KiB otherwise
    with _open_text(path) as stream:
        reader = csv.reader(stream, delimiter=separator, strict=True)
        names = next((fields for fields in reader if fields), [])
        _check_names(path, names)
        if len(names) == 1 and re.search(r"[;,\t|]", names[0]):
            raise DataError(
                f"{path}: the header is one column, {names[0]!r}; separate columns by commas "
                "(.csv) or tabs (.tsv)"
            )
        while True:
            place = f"{path}:{reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield place, BadRow(f"does not parse as CSV: {error}")
                continue
            if len(fields) == len(names):
                yield place, dict(zip(names, fields))
            elif fields:
                reason = (
                    f"has {len(fields)} fields where the header names {len(names)}: "
                    f"{', '.join(names)}"
                )
                yield place, BadRow(reason)


def _check_names(path: Path, names: list[str]) -> None:
    """Refuse two columns of one name.

    Raises:
        DataError: there are such.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}: the header names {', '.join(map(repr, twice))} twice; give every column a "
            "name of its own"
        )


def _read_parquet(path: Path) -> Iterator[PlacedRow]:
    # Pages are read one by one, never a whole row group.
    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        yield from _read_batches(path, file.iter_batches(COLUMNAR_ROWS_AT_ONCE))


def _read_arrow(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of Arrow IPC, a file (as Feather) or a stream (as ``datasets`` writes)."""
    with pa.memory_map(str(path)) as source:
        beginning = source.read(6)
        source.seek(0)
        if beginning == b"ARROW1":
            file = pa.ipc.open_file(source)
            yield from _read_batches(path, map(file.get_batch, range(file.num_record_batches)))
        else:
            yield from _read_batches(path, _batches_of_stream(source))


def _batches_of_stream(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream.

    Raises:
        ArrowInvalid: the marker of its end is missing. The format does not demand it, but without
            it nobody knows whether more followed.
    """
    stream = pa.ipc.open_stream(source)
    end = source.tell()
    for batch in stream:
        end = source.tell()
        yield batch
    if source.tell() == end:
        raise pa.ArrowInvalid(
            "its end-of-stream marker is missing, which closing the writer writes"
        )


def _read_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[PlacedRow]:
    number = 0
    for batch in batches:
        _check_names(path, batch.schema.names)
        clean = cleaner(batch.schema)
        for start in range(0, batch.num_rows, COLUMNAR_ROWS_AT_ONCE):
            for record in _records(batch.slice(start, COLUMNAR_ROWS_AT_ONCE)):
                number += 1
                yield f"{path}: row {number}", clean(record) if clean else record


def _records(batch: pa.RecordBatch) -> list[RowRecord | BadRow]:
    """Return the rows as Python objects; one with a value that Python has no form for is bad."""
    try:
        return batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError) as error:
        # text that is not UTF-8, a date after the year 9999, nanoseconds
        if batch.num_rows > 1:
            records = []
            for row in range(batch.num_rows):
                records += _records(batch.slice(row, 1))
            return records
        name = ", ".join(batch.schema.names)
        for column_name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist(maps_as_pydicts="lossy")
            except (ValueError, OverflowError):
                name = column_name
                break
        return [BadRow(f"column {name!r} cannot be read: {error}", "wrong_type")]


COLUMNAR: dict[str, Reader] = {
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": functools.partial(_read_separated, separator=","),
    ".tsv": functools.partial(_read_separated, separator="\t"),
    ".txt": _read_text,
    ".md": _read_text,
    ".text": _read_text,
    **COLUMNAR,
}
"""Functions that read a file, by the ending of its name."""
