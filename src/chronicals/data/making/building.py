"""Building of a token store: rows are read in chunks, become documents, and are written.

Memory is bounded whatever the size of the data: a few chunks at a time are tokenised, by the Rust
tokenizer's threads (``encoding``) or, if there are many, by other processes (``processes``).
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chronicals.config import ConfigurationError, Overlong
from chronicals.data.kinds.preferences import JUDGED, ROWS_LOOKED_BACK
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.data.making.documents import UNJUDGED
from chronicals.data.making.encoding import ChunkEncoder, Encoded
from chronicals.data.making.processes import TokenizingProcesses
from chronicals.data.making.store import STORE_SCHEMA, STORE_SCHEMA_OF_ITEMS, TokenStore
from chronicals.data.reading.gate import EXAMPLES, DataError, DataReport
from chronicals.data.reading.records import RowChunk, Unparsed, chunks_of
from chronicals.data.reading.sources import (
    RowSource,
    bytes_to_read,
    file_digests,
    read_unparsed,
    source_fingerprint,
)
from chronicals.data.tokens.template import Tokenizer

logger = logging.getLogger(__name__)

STORE_FORMAT = 10

EARLIER_STORE_FORMATS = (9, 8, 7)
"""Formats of which a store may hold the same tokens: a run that began with one can go on."""

MINUTE = 60.0

QUIET_MINUTES = 30
"""Minutes without a byte written after which the wait for another process ends in an error."""


def build_store(
    source: RowSource,
    tokenizer: Tokenizer,
    max_seq_length: int,
    cache_dir: Path | None = None,
    builder: bool = True,
    overlong: Overlong | None = None,
    seed: int = 0,
    processes: int | None = None,
) -> TokenStore:
    """Return the store of ``source``, which is tokenised and written if it was not made before.

    Args:
        source: what ``read_records`` reads.
        tokenizer: from rows to tokens.
        max_seq_length: most tokens of a document.
        cache_dir: where stores are kept (default ``~/.cache/chronicals``).
        builder: False waits until another process has written the file.
        overlong: what becomes of longer rows (default: texts are split, other rows cut).
        seed: chooses the rows that a fractional weight takes.
        processes: how many tokenise if there is much to do (default: one a core).

    Raises:
        ChildProcessError: one of these has died; nothing is left behind.
        ConfigurationError: ``cache_dir`` cannot be made, read or written.
        DataError: a file cannot be read, or the process that is waited for has stopped; nothing is
            left behind. What is wrong with single rows is in the store's report.
    """
    if isinstance(source, Iterator):
        source = list(source)
    cache_dir = cache_dir or Path.home() / ".cache" / "chronicals"
    # A row of other kinds may become several documents that belong together.
    has_items = not tokenizer.kinds <= {*DOCUMENT_KINDS}
    try:
        digests = file_digests(source, cache_dir)
        made_of: list[Any] = [
            max_seq_length,
            overlong,
            tokenizer.fingerprint(),
            source_fingerprint(source, cache_dir, seed),
        ]
        if has_items:
            made_of.append("prompts once, answers of other prompts")
        key, *earlier_keys = [
            hashlib.sha256(json.dumps([version, *made_of]).encode()).hexdigest()[:32]
            for version in (STORE_FORMAT, *EARLIER_STORE_FORMATS)
        ]
        path = cache_dir / f"{key}.arrow"
        if builder and not (path.exists() and path.with_suffix(".json").exists()):
            path.parent.mkdir(parents=True, exist_ok=True)
            encoder = ChunkEncoder(tokenizer, max_seq_length, overlong)
            rows = _unchanged(
                read_unparsed(source, seed), digests, lambda: file_digests(source, cache_dir)
            )
            tokenising = TokenizingProcesses(encoder, processes, bytes_to_read(source))
            _write(path, rows, tokenising, STORE_SCHEMA_OF_ITEMS if has_items else STORE_SCHEMA)
        elif not builder:
            _wait_for(path)
        return replace(TokenStore.open(path), earlier_keys=tuple(earlier_keys))
    except OSError as error:
        place = error.filename and Path(error.filename)
        if not place or not (place.is_relative_to(cache_dir) or cache_dir.is_relative_to(place)):
            raise
        raise ConfigurationError(
            f"cache_dir={str(cache_dir)!r}: token stores cannot be kept there ({place}: "
            f"{error.strerror}); name a folder that "
            "can be written"
        ) from error


def _unchanged(
    rows: Iterable[Unparsed], before: dict[Path, str], digests: Callable[[], dict[Path, str]]
) -> Iterator[Unparsed]:
    """Yield the rows.

    Args:
        rows: with their places.
        before: digests of the files that they come from.
        digests: computes these anew.

    Raises:
        DataError: at the end, if a file has changed meanwhile.
    """
    yield from rows
    after = digests()
    files = before.keys() | after.keys()
    changed = sorted({str(file) for file in files if before.get(file) != after.get(file)})
    if changed:
        raise DataError(
            f"{', '.join(changed)}: was written to while it was tokenised; start again when it is "
            "whole"
        )


def _wait_for(path: Path) -> None:
    """Poll until another process has written a store.

    The poll is logged, and no collective operation is held meanwhile.

    Raises:
        DataError: nothing was written for ``QUIET_MINUTES``.
    """
    waited = 0.0
    quiet = 0
    before = -1
    while not path.exists():
        if waited % MINUTE == 0:
            logger.info("waiting for another process to tokenise %s", path.name)
            written = 0
            for aside in path.parent.glob(f".{path.stem}.*"):
                with suppress(FileNotFoundError):  # it got its name meanwhile
                    written += aside.stat().st_size
            quiet = quiet + 1 if written == before else 0
            before = written
            if quiet == QUIET_MINUTES:
                raise DataError(
                    f"{path}: waited for another process to tokenise the data, which has written "
                    f"nothing for {QUIET_MINUTES} "
                    "minutes; its log says why, or start this one where it can build the store "
                    "itself"
                )
        time.sleep(0.2)
        waited = round(waited + 0.2, 1)


def _write(
    path: Path, rows: Iterable[Unparsed], tokenising: TokenizingProcesses, schema: pa.Schema
) -> None:
    """Tokenise rows and write their store.

    The tokens are written aside, then the description; the tokens get their name last, so that
    whoever sees it sees all.
    """
    counts = _Counts()
    is_judged = JUDGED in tokenising.encoder.tokenizer.kinds
    chunks = chunks_of(rows, ROWS_LOOKED_BACK if is_judged else 0)
    # Two machines that share a folder may have processes of the same number.
    aside = path.with_name(f".{path.stem}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    aside_description = aside.with_name(f"{aside.name}.json")
    # The collector would walk through thousands of rows, which hold no cycles.
    collects = gc.isenabled()
    gc.disable()
    try:
        with tokenising, open(aside, "wb") as raw:
            with pa.ipc.new_file(pa.PythonFile(raw), schema) as writer:
                for chunk, encoded in tokenising.encoded(chunks):
                    counts.add(chunk, encoded)
                    gc.collect(0)
                    documents = encoded.documents
                    if not len(documents):
                        continue
                    offsets = _column(documents.offsets.astype(np.int32))
                    columns = [
                        pa.ListArray.from_arrays(offsets, _column(documents.ids)),
                        pa.ListArray.from_arrays(offsets, _column(documents.trained)),
                        _column(documents.targets),
                        _column(documents.rows),
                        _column(encoded.hashes),
                        _column(encoded.row_kinds),
                        _column(documents.sides),
                        _column(documents.shared),
                        _column(documents.labels),
                    ]
                    columns = columns[: len(schema)]
                    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            raw.flush()
            os.fsync(raw.fileno())
        aside_description.write_text(json.dumps(counts.description(), indent=1))
        os.replace(aside_description, path.with_suffix(".json"))
        os.replace(aside, path)
    finally:
        if collects:
            gc.enable()
        aside.unlink(missing_ok=True)
        aside_description.unlink(missing_ok=True)


def _column(values: np.ndarray) -> pa.Array:
    """Return an Arrow array over ``values``, without a copy.

    ``pa.array`` would import pandas.
    """
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


@dataclass
class _Counts:
    """Counts over all chunks so far.

    Attributes:
        report: the gate's.
        max_id: the largest token id, -1 without any.
        hashes: uint64, of the tokens of each row that gave a document.
        rows: int64, numbers of these rows.
        places: int64, hashes of where they were read. A row that a weight repeats comes from the
            same place, and is no duplicate.
        labels: of judged rows, all that occur.
    """

    report: DataReport = field(default_factory=DataReport)
    max_id: int = -1
    hashes: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    labels: set[int] = field(default_factory=set)

    def add(self, chunk: RowChunk, encoded: Encoded) -> None:
        """Count the documents of a chunk."""
        documents = encoded.documents
        self.report.add(encoded.report)
        self.max_id = max(self.max_id, int(documents.ids.max(initial=-1)))
        self.labels.update(np.unique(documents.labels).tolist())
        rows, first = np.unique(documents.rows, return_index=True)
        places = [hash(chunk.places[at]) for at in (rows - chunk.first).tolist()]
        self.rows.append(rows)
        self.hashes.append(encoded.hashes[first])
        self.places.append(np.array(places, np.int64))

    def description(self) -> dict[str, Any]:
        """Return what lies beside the store as JSON."""
        hashes = np.concatenate([*self.hashes, np.zeros(0, np.uint64)])
        rows = np.concatenate([*self.rows, np.zeros(0, np.int64)])
        places = np.concatenate([*self.places, np.zeros(0, np.int64)])
        _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        earliest = first[group]
        is_repeated = earliest != np.arange(len(hashes))
        again = np.flatnonzero(is_repeated & (places != places[earliest]))
        for at in again[:EXAMPLES]:
            example = f"row {rows[at] + 1} equals row {rows[earliest[at]] + 1}"
            self.report.note("duplicate_row", int(rows[at]), example)
        if len(again) > EXAMPLES:
            self.report.note("duplicate_row", count=len(again) - EXAMPLES)
        labels = self.labels - {UNJUDGED}
        if len(labels) == 1:
            judgement = "good" if labels == {1} else "bad"
            self.report.note("one_label", example=f"every answer is {judgement}")
        return {"report": asdict(self.report), "max_id": self.max_id}
