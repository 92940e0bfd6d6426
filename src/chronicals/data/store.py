"""Token store: an Arrow IPC file, memory-mapped, named by the hash of everything that made it.

One row a document, two columns: ``ids`` (list of int32) and ``trained`` (list of bool as uint8). The gate's report lies
beside it as JSON. A store is written aside and renamed, so what has the name is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa

from chronicals.data.gate import DataError, DataReport
from chronicals.data.sources import Record, kind_of, read_records
from chronicals.data.template import Tokenizer, Tokens

FORMAT = 1
ROWS_A_BATCH = 8192
SCHEMA = pa.schema([("ids", pa.list_(pa.int32())), ("trained", pa.list_(pa.uint8()))])


@dataclass
class TokenStore:
    """Tokenised documents, read in place from the file.

    Attributes:
        path: the file; its stem is the content's key.
        lengths: int64 ``[documents]``, tokens of each.
        targets: int64 ``[documents]``, positions of each that predict a trained token.
        report: what the gate counted when the store was built.
        kinds: the kinds of row that were read.
        max_id: the largest token id, -1 without any.
        ids, trained: the whole file as int32 and as uint8, memory-mapped.
        id_starts, trained_starts: int64 ``[documents]``, where each document begins in these two.
    """

    path: Path
    lengths: np.ndarray
    targets: np.ndarray
    report: DataReport
    kinds: list[str]
    max_id: int
    ids: np.ndarray = field(repr=False)
    trained: np.ndarray = field(repr=False)
    id_starts: np.ndarray = field(repr=False)
    trained_starts: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def key(self) -> str:
        return self.path.stem

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and mask (uint8) of a document, as views of the file."""
        first, first_trained, length = self.id_starts[index], self.trained_starts[index], self.lengths[index]
        return self.ids[first : first + length], self.trained[first_trained : first_trained + length]

    def subset(self, indices: np.ndarray) -> TokenStore:
        """A store of some of the documents, over the same file."""
        chosen = {name: getattr(self, name)[indices] for name in ("lengths", "targets", "id_starts", "trained_starts")}
        return replace(self, **chosen)

    def split(self, share: float, seed: int) -> tuple[TokenStore, TokenStore]:
        """The documents in two, by seed: those to train on, and ``share`` of them (at least one) held out."""
        order = np.random.default_rng([seed, 1 << 32]).permutation(len(self))
        held = max(1, round(share * len(self)))
        if held >= len(self):
            raise DataError(f"validation_split={share}: leaves none of {len(self)} documents to train on")
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        """The store in a file that ``build`` wrote."""
        meta = json.loads(path.with_suffix(".json").read_text())
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        reader = pa.ipc.open_file(content)
        found = [_documents_in(reader.get_batch(n), content.address) for n in range(reader.num_record_batches)]
        id_starts, trained_starts, lengths = np.concatenate([np.zeros((3, 0), np.int64), *found], axis=1)
        ids = np.frombuffer(content, np.int32, content.size // 4)
        trained = np.frombuffer(content, np.uint8)
        for starts, column in ((id_starts, ids), (trained_starts, trained)):
            if (lengths < 0).any() or (starts < 0).any() or (starts + lengths > column.size).any():
                raise DataError(f"{path}: its tokens do not lie in the file; delete it, and it will be built again")
        targets = _count_targets(trained, trained_starts, lengths)
        return cls(
            path, lengths, targets, DataReport(**meta["report"]), meta["kinds"], meta["max_id"], ids, trained, id_starts,
            trained_starts,
        )  # fmt: skip

    @classmethod
    def build(
        cls,
        source: str | Path | Iterable[Record],
        tokenizer: Tokenizer,
        max_seq_length: int,
        cache_dir: Path | None = None,
        builder: bool = True,
    ) -> TokenStore:
        """The store of ``source``: opened if it was made before, otherwise tokenised and written.

        Args:
            source: what ``read_records`` reads.
            max_seq_length: longer texts are split, other rows cut; both are counted in the report.
            cache_dir: where stores are kept (default ``~/.cache/chronicals``).
            builder: False waits until another process has written the file.

        Raises:
            DataError: a row does not parse or cannot be tokenised; nothing is left behind.
        """
        if not isinstance(source, (str, Path)):
            source = list(source)
        key = _key(source, tokenizer, max_seq_length)
        path = (cache_dir or Path.home() / ".cache" / "chronicals") / f"{key}.arrow"
        while not path.exists():
            if builder:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, source, tokenizer, max_seq_length)
            else:
                time.sleep(0.2)
        return cls.open(path)


def _documents_in(batch: pa.RecordBatch, address: int) -> np.ndarray:
    """Begin of the ids, begin of the mask (both in elements from the start of the file, at ``address``), and length."""
    ids, trained = batch.columns[:2]
    offsets = ids.offsets.to_numpy().astype(np.int64)
    first, first_trained = (
        (column.values.buffers()[1].address - address) // column.values.type.byte_width + column.values.offset
        for column in (ids, trained)
    )
    return np.stack([first + offsets[:-1], first_trained + trained.offsets.to_numpy()[:-1], np.diff(offsets)])


@numba.njit(cache=True, nogil=True)
def _count_targets(trained: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Trained tokens of each document but for its first, which nothing predicts."""
    targets = np.zeros(starts.size, np.int64)
    for document in range(starts.size):
        count = 0
        for mark in trained[starts[document] + 1 : starts[document] + lengths[document]]:
            count += mark != 0
        targets[document] = count
    return targets


def _key(source: str | Path | list[Record], tokenizer: Tokenizer, max_seq_length: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {max_seq_length} {tokenizer.fingerprint()}".encode())
    if isinstance(source, list):
        for record in source:
            digest.update(json.dumps(record, default=_as_list).encode())
    elif Path(source).is_file():
        digest.update(Path(source).suffix.encode())
        with open(source, "rb") as content:
            for block in iter(lambda: content.read(1 << 20), b""):
                digest.update(block)
    else:
        raise DataError(f"{source}: no such file")
    return digest.hexdigest()[:32]


def _as_list(value: Any) -> Any:
    """What JSON does not know: arrays whole (``repr`` would leave out their middle)."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _write(path: Path, source: Any, tokenizer: Tokenizer, max_seq_length: int) -> None:
    """Write the tokens aside, then the description, and last give the tokens their name: who sees it sees all."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}.{uuid.uuid4().hex[:8]}")  # two machines may share a pid
    aside_description = aside.with_name(f"{aside.name}.json")
    report, kinds, max_id = DataReport(), set[str](), -1
    try:
        with open(aside, "wb") as raw:
            with pa.ipc.new_file(pa.PythonFile(raw), SCHEMA) as writer:
                documents = _documents(source, tokenizer, max_seq_length, report, kinds)
                while rows := list(itertools.islice(documents, ROWS_A_BATCH)):
                    max_id = max(max_id, *(max(ids) for ids, _ in rows))
                    writer.write_batch(_record_batch(rows))
            raw.flush()
            os.fsync(raw.fileno())
        description = {"report": report.to_dict(), "kinds": sorted(kinds), "max_id": max_id}
        aside_description.write_text(json.dumps(description, indent=1))
        os.replace(aside_description, path.with_suffix(".json"))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
        aside_description.unlink(missing_ok=True)


def _record_batch(rows: list[Tokens]) -> pa.RecordBatch:
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])]).astype(np.int32)
    ids = np.fromiter((token for ids, _ in rows for token in ids), np.int32, offsets[-1])
    trained = np.fromiter((flag for _, flags in rows for flag in flags), np.uint8, offsets[-1])
    lists = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (ids, trained)]
    return pa.RecordBatch.from_arrays(lists, schema=SCHEMA)


def _documents(source: Any, tokenizer: Tokenizer, max_seq_length: int, report: DataReport, kinds: set[str]) -> Iterator[Tokens]:
    for row, (where, record) in enumerate(read_records(source)):
        report.rows += 1
        kind = kind_of(record, where)
        kinds.add(kind)
        ids, trained = tokenizer.encode(record, where)
        for piece in _fit(ids, trained, kind, tokenizer.objective, max_seq_length, report, row):
            targets = sum(piece[1][1:])
            if targets:
                report.documents += 1
                report.tokens += len(piece[0])
                report.targets += targets
                yield piece
            elif sum(trained[1:]):
                report.leave_out("without a trained token left after the cut at max_seq_length", row)
            else:
                report.leave_out("without a trained token", row)


def _fit(
    ids: list[int], trained: list[bool], kind: str, objective: str, width: int, report: DataReport, row: int
) -> list[Tokens]:
    """The row as documents of at most ``width`` tokens: a text is split, anything else is cut."""
    if len(ids) <= width:
        return [(ids, trained)]
    if (kind == "text" or objective == "pretraining") and width > 1:
        report.split += 1
        report.note("split", row)
        # Pieces overlap by one token, so that every target keeps its place in exactly one of them.
        return [(ids[i : i + width], trained[i : i + width]) for i in range(0, len(ids) - 1, width - 1)]
    report.truncated += 1
    report.note("truncated", row)
    if any(trained[width:]):
        report.stop_cut += 1
        report.note("stop token cut", row)
    return [(ids[:width], trained[:width])]
