"""Reading records: JSON lines and plain text files, or rows that are in memory already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from chronicals.data.gate import DataError
from chronicals.data.rows import Record


def read_records(source: str | Path | Iterable[Record]) -> Iterator[tuple[str, Record]]:
    """Yield ``(where, record)`` for each row; ``where`` is what an error message calls it.

    Args:
        source: a ``.jsonl`` file, a text file (one record of kind ``text``), or rows in memory (a list of mappings, a
            ``datasets.Dataset``).

    Raises:
        DataError: the file is missing, is of a kind that cannot be read, or a line does not parse.
    """
    if not isinstance(source, (str, Path)):
        yield from ((f"row {number}", record) for number, record in enumerate(source, 1))
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _read_json_lines(path)
    elif path.suffix in (".txt", ".md", ".text"):
        try:
            yield f"{path}", {"text": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    else:
        raise DataError(f"{path}: files ending in {path.suffix!r} cannot be read; give .jsonl, .txt or .md")


def _read_json_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{where}: does not parse as JSON: {error}") from error
            yield where, record
