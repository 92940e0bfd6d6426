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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chronicals.data.gate import DataError, DataReport
from chronicals.data.sources import BadRow, Record, kind_of, read_records
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
    """

    path: Path
    lengths: np.ndarray
    targets: np.ndarray
    report: DataReport
    kinds: list[str]
    max_id: int
    _batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(repr=False)
    _index: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def key(self) -> str:
        return self.path.stem

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and mask (uint8) of a document, as views of the file."""
        batch, row = divmod(int(index if self._index is None else self._index[index]), ROWS_A_BATCH)
        offsets, ids, trained = self._batches[batch]
        span = slice(offsets[row], offsets[row + 1])
        return ids[span], trained[span]

    def subset(self, indices: np.ndarray) -> TokenStore:
        """A store of some of the documents, over the same file."""
        return replace(
            self,
            lengths=self.lengths[indices],
            targets=self.targets[indices],
            _index=indices if self._index is None else self._index[indices],
        )

    def split(self, share: float, seed: int) -> tuple[TokenStore, TokenStore]:
        """The documents in two, by seed: those to train on, and ``share`` of them (at least one) held out."""
        order = np.random.default_rng([seed, 1 << 32]).permutation(len(self))
        held = max(1, round(share * len(self)))
        if held >= len(self):
            raise DataError(f"validation_split={share}: leaves none of {len(self)} documents to train on")
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        meta = json.loads(path.with_suffix(".json").read_text())
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            batches, lengths, targets = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
            for number in range(reader.num_record_batches):
                ids, trained = reader.get_batch(number).columns
                offsets = ids.offsets.to_numpy().astype(np.int64)
                mask = trained.values.to_numpy()
                running = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
                lengths.append(np.diff(offsets))
                targets.append(running[offsets[1:]] - running[offsets[:-1]] - mask[offsets[:-1]])
                batches.append((offsets, ids.values.to_numpy(), mask))
        return cls(
            path, np.concatenate(lengths), np.concatenate(targets), DataReport(**meta["report"]), meta["kinds"],
            meta["max_id"], batches,
        )  # fmt: skip

    @classmethod
    def build(
        cls,
        source: Any,
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
        if isinstance(record, BadRow):
            raise DataError(f"{where}: {record.reason}")
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
