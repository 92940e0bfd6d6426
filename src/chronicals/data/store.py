"""Token store: an Arrow IPC file, memory-mapped, named by the hash of everything that made it.

One row a document: ``ids`` (list of int32), ``trained`` (list of bool as uint8), how many of its positions predict a trained
token (``targets``), the number of the ``row`` it came from, and a ``hash`` of that row's tokens. The gate's report lies beside
it as JSON. A store is written aside and renamed, so what has the name is whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from chronicals.data.gate import DataError, DataReport
from chronicals.data.rows import CHATS

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())), ("trained", pa.list_(pa.uint8())), ("targets", pa.int64()), ("row", pa.int64()),
        ("hash", pa.uint64()),
    ]
)  # fmt: skip


ODD = np.uint64(0x9E3779B97F4A7C15)
"""Tells the pieces of a row apart, whose hash is the same."""


@dataclass
class TokenStore:
    """Tokenised documents, read in place from the file.

    Attributes:
        path: the file; its stem is the content's key.
        lengths: int64 ``[documents]``, tokens of each.
        targets: int64 ``[documents]``, positions of each that predict a trained token.
        rows: int64 ``[documents]``, the row each came from, from 0 in reading order.
        hashes: uint64 ``[documents]``, the same where the tokens of the whole rows are.
        report: what the gate counted when the store was built.
        max_id: the largest token id, -1 without any.
        ids, trained: the whole file as int32 and as uint8, memory-mapped.
        id_starts, trained_starts: int64 ``[documents]``, where each document begins in these two.
        earlier_keys: keys that earlier versions of this package gave to the same content.
    """

    path: Path
    lengths: np.ndarray
    targets: np.ndarray
    rows: np.ndarray
    hashes: np.ndarray
    report: DataReport
    max_id: int
    ids: np.ndarray = field(repr=False)
    trained: np.ndarray = field(repr=False)
    id_starts: np.ndarray = field(repr=False)
    trained_starts: np.ndarray = field(repr=False)
    earlier_keys: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest document, 0 without any."""
        return int(self.lengths.max(initial=0))

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def kinds(self) -> list[str]:
        """The kinds of row that were read."""
        return sorted(self.report.kinds)

    @property
    def chats(self) -> bool:
        """Whether any row went through the chat template."""
        return any(kind in CHATS for kind in self.report.kinds)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and mask (uint8) of a document, as views of the file."""
        first, first_trained, length = self.id_starts[index], self.trained_starts[index], self.lengths[index]
        return self.ids[first : first + length], self.trained[first_trained : first_trained + length]

    def subset(self, indices: np.ndarray) -> TokenStore:
        """A store of some of the documents, over the same file."""
        columns = ("lengths", "targets", "rows", "hashes", "id_starts", "trained_starts")
        return replace(self, **{name: getattr(self, name)[indices] for name in columns})

    def split(self, share: float, seed: int) -> tuple[TokenStore, TokenStore]:
        """The documents in two, by seed: those to train on, and ``share`` of them (at least one) held out.

        Equal rows stay on one side; pieces of one row need not.
        """
        piece = np.arange(len(self)) - np.searchsorted(self.rows, self.rows)
        _, group = np.unique(self.hashes + piece.astype(np.uint64) * ODD, return_inverse=True)
        order = np.random.default_rng([seed, 1 << 32]).permutation(group.max(initial=-1) + 1)
        held = max(1, round(share * len(order)))
        if held >= len(order):
            raise DataError(f"validation_split={share}: leaves none of {len(order)} documents to train on")
        apart = np.isin(group, order[:held])
        return self.subset(np.flatnonzero(~apart)), self.subset(np.flatnonzero(apart))

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
        targets, rows, hashes = (
            np.concatenate(
                [np.zeros(0, dtype), *(_values(reader.get_batch(n)[name], dtype) for n in range(reader.num_record_batches))]
            )
            for name, dtype in (("targets", np.int64), ("row", np.int64), ("hash", np.uint64))
        )
        return cls(
            path, lengths, targets, rows, hashes, DataReport.from_dict(meta["report"]), meta["max_id"], ids, trained,
            id_starts, trained_starts,
        )  # fmt: skip


def _documents_in(batch: pa.RecordBatch, address: int) -> np.ndarray:
    """Begin of the ids, begin of the mask (both in elements from the start of the file, at ``address``), and length."""
    ids, trained = batch.columns[:2]
    offsets, trained_offsets = (_values(column.offsets, np.int32).astype(np.int64) for column in (ids, trained))
    first, first_trained = (
        (column.values.buffers()[1].address - address) // column.values.type.byte_width + column.values.offset
        for column in (ids, trained)
    )
    return np.stack([first + offsets[:-1], first_trained + trained_offsets[:-1], np.diff(offsets)])


def _values(column: pa.Array, dtype: type) -> np.ndarray:
    """Without a copy, and without pandas, which ``to_numpy`` would import."""
    return np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
