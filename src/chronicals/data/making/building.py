"""Building a token store: rows are read in chunks, become documents, are counted, and written.

Memory is bounded whatever the size of the data: some chunks at a time are on their way, by the Rust
tokenizer's threads (``chunks``) or, where there are many, by other processes (``processes``). The
gate judges at the end.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chronicals.config import ChronicalsConfig, ConfigurationError, Overlong
from chronicals.data.kinds.judged_answers import JUDGED, ROWS_LOOKED_BACK
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.data.making.chunks import Chunk, ChunkEncoder, Encoded, chunks_of
from chronicals.data.making.documents import UNJUDGED
from chronicals.data.making.processes import TokenizingProcesses
from chronicals.data.making.store import OF_ITEMS, SCHEMA, TokenStore
from chronicals.data.reading.gate import EXAMPLES, DataError, DataReport, check_shares
from chronicals.data.reading.ledger import Ledger
from chronicals.data.reading.records import Unparsed
from chronicals.data.reading.sources import (
    Source,
    bytes_to_read,
    file_digests,
    read_unparsed,
    source_fingerprint,
)
from chronicals.data.tokens.template import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 10
EARLIER_FORMATS = (9, 8, 7)
"""Formats of which a store may hold the same tokens, so that a run that began with one can go
on.
"""

MINUTE = 60.0
PATIENCE = 30
"""Minutes without a byte written after which whoever waits for another process gives it up."""


def open_store(
    source: Source,
    tokenizer: Any,
    config: ChronicalsConfig,
    name: str | None = None,
    builder: bool = True,
    embedding_rows: int | None = None,
    training: TokenStore | None = None,
    report_file: Path | None = None,
    kinds: Collection[str] = DOCUMENT_KINDS,
    scored: bool = False,
) -> TokenStore:
    """Tokenised data that has passed the gate; its report is logged.

    Args:
        source: what ``read_records`` reads.
        tokenizer: a transformers tokenizer.
        config: widths, objective, what the gate lets pass, where stores are kept.
        name: what messages call the data (by default its path).
        builder: False waits until another process has written the store.
        embedding_rows: of the model, if there is one.
        training: what is trained on, where this is held-out data.
        report_file: where the report is written as JSON, also when the gate stays shut.
        kinds: of rows that the objective takes.
        scored: whether nothing of it is trained; so it is, too, where ``training`` is given.

    Raises:
        DataError: training on it would be wrong.
        ConfigurationError: ``gate`` names no rule.
    """
    name = name or _name_of(source)
    store = _tokenised(source, tokenizer, config, builder, embedding_rows, kinds)
    if training is not None:
        note_overlap(store, training)
    return _judged(
        name, store, _ledger_of_one(store, scored or training is not None), config, report_file
    )


def open_divided(
    source: Source,
    tokenizer: Any,
    config: ChronicalsConfig,
    name: str | None = None,
    builder: bool = True,
    embedding_rows: int | None = None,
    report_file: Path | None = None,
    kinds: Collection[str] = DOCUMENT_KINDS,
) -> tuple[TokenStore, TokenStore]:
    """As ``open_store``, in two: what is trained, and the share ``validation_split``, which
    ``open_held_out`` reports on.

    Raises:
        DataError: training on it would be wrong, or the share leaves nothing to train on.
        ConfigurationError: ``gate`` names no rule.
    """
    assert config.validation_split
    name = name or _name_of(source)
    store = _tokenised(source, tokenizer, config, builder, embedding_rows, kinds)
    if not len(store) or store.report.errors(config.gate):
        _judged(name, store, _ledger_of_one(store), config, report_file)  # which raises
    training, held_out = store.split(config.validation_split, config.seed)
    ledger = _ledger_of_two(store, training, held_out)
    training = replace(training, report=_with_documents_of(training, store.report))
    return _judged(name, training, ledger, config, report_file), held_out


def _name_of(source: Source) -> str:
    return str(source) if isinstance(source, (str, Path)) else "dataset"


def _tokenised(
    source: Source,
    tokenizer: Any,
    config: ChronicalsConfig,
    builder: bool,
    embedding_rows: int | None,
    kinds: Collection[str],
) -> TokenStore:
    """The store of ``source``, and in its report what of it the model's embedding does not hold."""
    check_shares(config.gate)
    encoder = Tokenizer.configured(tokenizer, config, kinds)
    store = build_store(
        source,
        encoder,
        config.max_seq_length,
        config.cache_dir,
        builder,
        config.overlong,
        config.seed,
        config.dataset_num_proc,
    )
    if embedding_rows is not None:
        note_foreign_ids(store, len(tokenizer), embedding_rows)
    return store


def open_held_out(
    held_out: TokenStore, config: ChronicalsConfig, report_file: Path | None = None
) -> TokenStore:
    """The part of a store that is held out, with a report of its own.

    Args:
        report_file: where the report is written as JSON.

    Raises:
        DataError: it holds nothing that is trained.
    """
    kinds = held_out.rows_by_kind
    before = held_out.report
    own = DataReport(
        sum(kinds.values()), kinds=kinds, forms=dict(before.forms), answers=before.answers
    )
    held_out = replace(held_out, report=_with_documents_of(held_out, own))
    return _judged(
        f"validation_split={config.validation_split}",
        held_out,
        Ledger(kinds, held_out=kinds),
        config,
        report_file,
    )


def _with_documents_of(store: TokenStore, report: DataReport) -> DataReport:
    """``report`` with the documents and tokens of ``store``."""
    prompts, mismatched = (0, 0) if store.items is None else (store.prompts, store.mismatched)
    tokens = int(store.lengths.sum())
    targets = int(store.targets.sum())
    return replace(
        report,
        documents=len(store),
        tokens=tokens,
        targets=targets,
        prompts=prompts,
        mismatched=mismatched,
    )


def _ledger_of_one(store: TokenStore, scored: bool = False) -> Ledger:
    """What became of the rows of a data set that is trained, or scored, as a whole."""
    ledger = store.report.ledger
    return replace(ledger, trained={}, held_out=ledger.trained) if scored else ledger


def _ledger_of_two(store: TokenStore, training: TokenStore, held_out: TokenStore) -> Ledger:
    """What became of the rows of a data set of which some are held out; a text in pieces counts
    where any of it is trained.
    """
    alone = held_out.subset(np.flatnonzero(~np.isin(held_out.rows, training.rows)))
    divided = len(np.intersect1d(held_out.rows, training.rows))
    report = store.report
    return Ledger(report.kinds, training.rows_by_kind, alone.rows_by_kind, report.left_out, divided)


def _judged(
    name: str, store: TokenStore, ledger: Ledger, config: ChronicalsConfig, file: Path | None
) -> TokenStore:
    """The store with its ledger; write and log the report, and raise where training would be
    wrong.
    """
    report = store.report
    if file is not None:
        counts = {
            field: value for field, value in report.to_dict().items() if field != "left_out"
        }  # the ledger has it
        content = {
            "data": name,
            **counts,
            "ledger": ledger.to_dict(),
            "findings": report.entries(config.gate),
        }
        try:  # one process of several writes it, and must not stop alone
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content, indent=1))
        except OSError as error:
            logger.error(
                "%s: the report on the data cannot be written there (%s)", file, error.strerror
            )
            with suppress(OSError):
                file.unlink()
    log_report(name, report, config.gate, ledger)
    report.check(name, config.gate)
    return replace(store, ledger=ledger)


def log_report(
    name: str, report: DataReport, shares: Mapping[str, float], ledger: Ledger | None = None
) -> None:
    """The summary, then a table of what was found."""
    for level, line in report.table(shares, ledger):
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s: %s", name, line)


def note_foreign_ids(store: TokenStore, vocabulary: int, embedding_rows: int) -> None:
    """Count what of the tokenizer and of the data the model's embedding does not hold."""
    if vocabulary > embedding_rows:
        example = f"{vocabulary:,} tokens, {embedding_rows:,} rows of the embedding"
        store.report.note(
            "vocabulary_too_large", example=example, count=vocabulary - embedding_rows
        )
    if store.max_id >= embedding_rows:
        foreign = np.array(
            [store.document(n)[0].max() >= embedding_rows for n in range(len(store))]
        )
        for row in np.unique(store.rows[foreign]):
            store.report.note(
                "id_out_of_range", int(row), f"token id {store.max_id} of {embedding_rows:,}"
            )


def note_overlap(held_out: TokenStore, training: TokenStore) -> None:
    """Count the held-out documents that are trained on as well."""
    for row in np.unique(held_out.rows[np.isin(held_out.hashes, training.hashes)]):
        held_out.report.note("held_out_in_training", int(row))


def build_store(
    source: Source,
    tokenizer: Tokenizer,
    max_seq_length: int,
    cache_dir: Path | None = None,
    builder: bool = True,
    overlong: Overlong | None = None,
    seed: int = 0,
    processes: int | None = None,
) -> TokenStore:
    """The store of ``source``: opened if it was made before, otherwise tokenised and written.

    Args:
        source: what ``read_records`` reads.
        max_seq_length: most tokens of a document.
        cache_dir: where stores are kept (default ``~/.cache/chronicals``).
        builder: False waits until another process has written the file.
        overlong: what becomes of longer rows (default: texts are split, other rows cut).
        seed: chooses the rows that a fractional weight takes.
        processes: how many tokenise where there is much to do (default: one a core).

    Raises:
        ChildProcessError: one of these has died; nothing is left behind.
        ConfigurationError: ``cache_dir`` cannot be made, read or written.
        DataError: a file cannot be read, or the process that is waited for has stopped; nothing is
            left behind. What is wrong with single rows is in the store's report.
    """
    if isinstance(source, Iterator):
        source = list(source)
    cache_dir = cache_dir or Path.home() / ".cache" / "chronicals"
    with _naming(cache_dir):
        content = file_digests(source, cache_dir)
        made_of: list[Any] = [
            max_seq_length,
            overlong,
            tokenizer.fingerprint(),
            source_fingerprint(source, cache_dir, seed),
        ]
        made_of += ["prompts once, answers of other prompts"] if _has_items(tokenizer) else []
        key, *earlier = (_key([version, *made_of]) for version in (FORMAT, *EARLIER_FORMATS))
        path = cache_dir / f"{key}.arrow"
        if builder and not (path.exists() and path.with_suffix(".json").exists()):
            path.parent.mkdir(parents=True, exist_ok=True)
            encoder = ChunkEncoder(tokenizer, max_seq_length, overlong)
            rows = _unchanged(
                read_unparsed(source, seed), content, lambda: file_digests(source, cache_dir)
            )
            _write(path, rows, TokenizingProcesses(encoder, processes, bytes_to_read(source)))
        elif not builder:
            _wait_for(path)
        return replace(TokenStore.open(path), earlier_keys=tuple(earlier))


def _has_items(tokenizer: Tokenizer) -> bool:
    """Whether a row may become several documents that belong together."""
    return not tokenizer.kinds <= {*DOCUMENT_KINDS}


def _key(made_of: list[Any]) -> str:
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


@contextmanager
def _naming(cache_dir: Path) -> Iterator[None]:
    """Within: where the system refuses something of the cache, the field is named."""
    try:
        yield
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
    rows: Iterable[Unparsed], before: dict[Path, str], now: Callable[[], dict[Path, str]]
) -> Iterator[Unparsed]:
    """The rows, and at their end an error where the files they came from hold something else
    than before.
    """
    yield from rows
    after = now()
    changed = sorted(
        {str(file) for file in before.keys() | after.keys() if before.get(file) != after.get(file)}
    )
    if changed:
        raise DataError(
            f"{', '.join(changed)}: was written to while it was tokenised; start again when it is "
            "whole"
        )


def _wait_for(path: Path) -> None:
    """Poll, and say so: no collective is held while another process tokenises.

    Raises:
        DataError: it has written nothing for half an hour.
    """
    waited = 0.0
    quiet = 0
    before = -1
    while not path.exists():
        if waited % MINUTE == 0:
            logger.info("waiting for another process to tokenise %s", path.name)
            written = _bytes_aside(path)
            quiet, before = (quiet + 1, before) if written == before else (0, written)
            if quiet == PATIENCE:
                raise DataError(
                    f"{path}: waited for another process to tokenise the data, which has written "
                    f"nothing for {PATIENCE} "
                    "minutes; its log says why, or start this one where it can build the store "
                    "itself"
                )
        time.sleep(0.2)
        waited = round(waited + 0.2, 1)


def _aside(path: Path, name: str) -> Path:
    """Where a store is written before it has its name."""
    return path.with_name(f".{path.stem}.{name}")


def _bytes_aside(path: Path) -> int:
    """That all who build the store have written so far."""
    written = 0
    for aside in path.parent.glob(_aside(path, "*").name):
        with suppress(FileNotFoundError):  # it was done meanwhile
            written += aside.stat().st_size
    return written


def _write(path: Path, rows: Iterable[Unparsed], tokenising: TokenizingProcesses) -> None:
    """Write the tokens aside, then the description, and last give the tokens their name: who
    sees it sees all.
    """
    schema = SCHEMA
    kinds = tokenising.encoder.tokenizer.kinds
    if _has_items(tokenising.encoder.tokenizer):
        for name in OF_ITEMS:
            schema = schema.append(pa.field(name, pa.int64()))
    counts, aside = (
        _Counts(),
        _aside(path, f"{os.getpid()}.{uuid.uuid4().hex[:8]}"),
    )  # two machines may share a pid
    aside_description = aside.with_name(f"{aside.name}.json")
    try:
        with _collecting_by_chunks(), tokenising, open(aside, "wb") as raw:
            with pa.ipc.new_file(pa.PythonFile(raw), schema) as writer:
                for chunk, encoded in tokenising.encoded(
                    chunks_of(rows, ROWS_LOOKED_BACK if JUDGED in kinds else 0)
                ):
                    counts.add(chunk, encoded)
                    if len(encoded.documents):
                        writer.write_batch(_record_batch(encoded, schema))
                    gc.collect(0)
            raw.flush()
            os.fsync(raw.fileno())
        aside_description.write_text(json.dumps(counts.description(), indent=1))
        os.replace(aside_description, path.with_suffix(".json"))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
        aside_description.unlink(missing_ok=True)


@contextmanager
def _collecting_by_chunks() -> Iterator[None]:
    """Keep Python's collector from walking through a chunk's thousands of rows, which hold no
    cycles, many times over.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _record_batch(encoded: Encoded, schema: pa.Schema) -> pa.RecordBatch:
    documents = encoded.documents
    offsets = _column(documents.offsets.astype(np.int32))
    lists = [
        pa.ListArray.from_arrays(offsets, _column(values))
        for values in (documents.ids, documents.trained)
    ]
    of_rows = documents.targets, documents.rows, encoded.hashes, encoded.row_kinds
    numbers = [
        _column(values)
        for values in (*of_rows, documents.sides, documents.shared, documents.labels)
    ]
    return pa.RecordBatch.from_arrays([*lists, *numbers][: len(schema)], schema=schema)


def _column(values: np.ndarray) -> pa.Array:
    """Without a copy, and without pandas, which ``pa.array`` would import."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


@dataclass
class _Counts:
    """What was counted of the chunks so far."""

    report: DataReport = field(default_factory=DataReport)
    max_id: int = -1
    hashes: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    """Hashes of where each row was read: a row that a weight repeats comes from the same place."""
    labels: set[int] = field(default_factory=set)
    """That any row has."""

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        self.report.add(encoded.report)
        self.max_id = max(self.max_id, int(encoded.documents.ids.max(initial=-1)))
        self.labels.update(np.unique(encoded.documents.labels).tolist())
        rows, first = np.unique(encoded.documents.rows, return_index=True)
        self.rows.append(rows)
        self.hashes.append(encoded.hashes[first])
        self.places.append(
            np.array([hash(chunk.wheres[at]) for at in (rows - chunk.first).tolist()], np.int64)
        )

    def description(self) -> dict[str, Any]:
        self._note_duplicates()
        self._note_one_label()
        return {"report": self.report.to_dict(), "max_id": self.max_id}

    def _note_one_label(self) -> None:
        if len(judged := self.labels - {UNJUDGED}) == 1:
            self.report.note(
                "one_label", example=f"every answer is {'good' if judged == {1} else 'bad'}"
            )

    def _note_duplicates(self) -> None:
        hashes = np.concatenate([*self.hashes, np.zeros(0, np.uint64)])
        rows, places = (
            np.concatenate([*found, np.zeros(0, np.int64)]) for found in (self.rows, self.places)
        )
        _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        earliest = first[group]
        again = np.flatnonzero((earliest != np.arange(len(hashes))) & (places != places[earliest]))
        for document in again[:EXAMPLES]:
            example = f"row {rows[document] + 1} equals row {rows[earliest[document]] + 1}"
            self.report.note("duplicate_row", int(rows[document]), example)
        if len(again) > EXAMPLES:
            self.report.note("duplicate_row", count=len(again) - EXAMPLES)
