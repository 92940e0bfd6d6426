"""Token store: an Arrow IPC file, memory-mapped, named by the hash of everything that made it.

Each row of the file is a document: ``ids`` (list of int32), ``trained`` (list of bool as uint8),
how many of its positions predict a trained token (``targets``), the number of the ``row`` it came
from, a ``hash`` of that row's tokens, and the ``kind`` of that row. Documents that belong together,
as the two answers of a preference do, follow each other as one *item*. Further columns then say the
place of a document in its item (``side``), how many tokens of their common prompt stand before it
(``shared``), and how the row judges its answer (``label``). The gate's report lies beside the file
as JSON. A store is written aside and renamed, so a file that has the name is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from chronicals.data.kinds.rows import CHAT_KINDS, ROW_KINDS
from chronicals.data.making.documents import IS_SHARED, SHARED_COLUMN
from chronicals.data.reading.gate import DataError, DataReport
from chronicals.data.reading.ledger import Ledger

STORE_SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),
        ("trained", pa.list_(pa.uint8())),
        ("targets", pa.int64()),
        ("row", pa.int64()),
        ("hash", pa.uint64()),
        ("kind", pa.int8()),
    ]
)

SIDE_COLUMN = "side"
"""Column of a document's place in its item, int64 from 0: an item begins at each 0.

Without it every document is an item.
"""

LABEL_COLUMN = "label"
"""Column of a row's judgement of its answer: 1 good, 0 bad, -1 none."""

ITEM_COLUMNS = (SIDE_COLUMN, SHARED_COLUMN, LABEL_COLUMN)
"""Columns of a store whose rows may become several documents, in their order in the file."""

STORE_SCHEMA_OF_ITEMS = pa.schema([*STORE_SCHEMA, *((name, pa.int64()) for name in ITEM_COLUMNS)])
"""Schema of such a store."""

PIECE_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd factor that distinguishes the pieces of a row, whose hash is the same."""


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``starts[i] … starts[i] + counts[i] - 1`` for each i, one behind the other, int64."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)


@dataclass(frozen=True)
class TargetColumn:
    """Values of the targets of some documents.

    Attributes:
        values: ``[rows, ...]``, the values of each document's targets in their order.
        starts: int64 ``[documents]``, first row of each document.
        counts: int64 ``[documents]``, targets of each document.
    """

    values: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, counts: np.ndarray) -> TargetColumn:
        """Return the column of a store.

        Args:
            values: ``[targets in all, ...]``.
            counts: int64 ``[documents]``, targets of each document.

        Raises:
            ValueError: there are more or fewer values than targets.
        """
        if len(values) != counts.sum():
            raise ValueError(f"{len(values)} values for {counts.sum()} targets")
        return cls(values, np.cumsum(counts) - counts, counts)

    def subset(self, indices: np.ndarray) -> TargetColumn:
        """Return the column of some of the documents, over the same values."""
        return replace(self, starts=self.starts[indices], counts=self.counts[indices])

    def rows(self, documents: np.ndarray) -> np.ndarray:
        """Return the rows of these documents' targets, one behind the other, int64."""
        return ranges(self.starts[documents], self.counts[documents])

    def laid(self, documents: np.ndarray, is_target: np.ndarray) -> np.ndarray:
        """Return the values at the targets of a Batch, zero elsewhere, ``[T, ...]``.

        Args:
            documents: int64, the documents of the Batch in their order.
            is_target: bool ``[T]``.
        """
        column = np.zeros((len(is_target), *self.values.shape[1:]), self.values.dtype)
        column[is_target] = self.values[self.rows(documents)]
        return column


@dataclass
class TokenStore:
    """Tokenised documents, read in place from the file.

    Attributes:
        path: the file; its stem is the content's key.
        lengths: int64 ``[documents]``, tokens of each.
        targets: int64 ``[documents]``, positions of each that predict a trained token.
        rows: int64 ``[documents]``, the row each came from, from 0 in reading order.
        hashes: uint64 ``[documents]``, equal if all tokens of the rows are equal.
        report: what the gate counted when the store was built.
        max_id: the largest token id, -1 without any.
        ids, trained: the whole file as int32 and as uint8, memory-mapped.
        id_starts, trained_starts: int64 ``[documents]``, where each document begins in these two.
        earlier_keys: keys that earlier versions of this package gave to the same content.
        columns: further values ``[documents]`` by name, which become segments of Batches: ``side``,
            and what ``with_column`` adds.
        of_targets: further values of the targets by name, which become columns of Batches: what
            ``with_values`` adds.
        row_kinds: int8 ``[documents]``, the kind of each one's row, by its place in ``ROW_KINDS``.
        ledger: what became of the rows that were read.
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
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    of_targets: Mapping[str, TargetColumn] = field(default_factory=dict)
    row_kinds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int8), repr=False)
    ledger: Ledger = field(default_factory=Ledger)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest document with the shared prompt before it; 0 without any."""
        return int((self.lengths + self.before).max(initial=0))

    @property
    def alike(self) -> bool:
        """True if all documents have as many tokens, and as many targets."""
        return len(self) > 0 and np.ptp(self.lengths) == 0 and np.ptp(self.targets) == 0

    @property
    def before(self) -> np.ndarray:
        """int64 ``[documents]``, tokens of a shared prompt before each."""
        if SHARED_COLUMN not in self.columns:
            return np.zeros(len(self), np.int64)
        return np.maximum(self.columns[SHARED_COLUMN], 0)

    @property
    def key(self) -> str:
        """Hash of everything that made the content."""
        return self.path.stem

    @property
    def kinds(self) -> list[str]:
        """Kinds of row in whose form documents are trained; of pairs, those of their answers."""
        return sorted(self.report.forms)

    @property
    def rows_by_kind(self) -> dict[str, int]:
        """Number of rows of each kind that the documents come from."""
        _, first = np.unique(self.rows, return_index=True)
        counts = np.bincount(self.row_kinds[first], minlength=len(ROW_KINDS)).tolist()
        return {kind: count for kind, count in zip(ROW_KINDS, counts, strict=True) if count}

    @property
    def chats(self) -> bool:
        """True if any row went through the chat template."""
        return any(kind in CHAT_KINDS for kind in self.report.forms)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (int32) and mask (uint8) of a document, as views of the file."""
        length = self.lengths[index]
        first = self.id_starts[index]
        ids = self.ids[first : first + length]
        first = self.trained_starts[index]
        return ids, self.trained[first : first + length]

    @property
    def tokens_shared(self) -> int:
        """Prompt tokens saved by storing a shared prompt once for all answers of its item."""
        if SHARED_COLUMN not in self.columns:
            return 0
        stored_once = self.lengths[self.columns[SHARED_COLUMN] == IS_SHARED].sum()
        return int(self.before.sum() - stored_once)

    def is_prompt(self, index: int) -> bool:
        """Return whether a document is the prompt that the answers of its item share."""
        return SHARED_COLUMN in self.columns and bool(
            self.columns[SHARED_COLUMN][index] == IS_SHARED
        )

    def whole_document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask of a document with the shared prompt in front of it."""
        ids, trained = self.document(index)
        if not self.before[index]:
            return ids, trained
        # The prompt is the last document of the item, the next one with a negative value.
        prompt = index + int(np.argmax(self.columns[SHARED_COLUMN][index:] < 0))
        prompt_ids, untrained = self.document(prompt)
        return np.concatenate([prompt_ids, ids]), np.concatenate([untrained, trained])

    @property
    def items(self) -> np.ndarray | None:
        """Bounds of items, int64 ``[items + 1]``; None if every document is one.

        Item i is the documents ``items[i]:items[i + 1]``.
        """
        if SIDE_COLUMN not in self.columns:
            return None
        return np.append(np.flatnonzero(self.columns[SIDE_COLUMN] == 0), len(self))

    def with_column(self, name: str, values: np.ndarray) -> TokenStore:
        """Return the store with one more value for each document.

        Examples are a reference model's log-probability (float32), and ``weight``, by which the
        loss of each of the document's targets is multiplied.

        Raises:
            ValueError: there are more or fewer values than documents.
        """
        if len(values) != len(self):
            raise ValueError(f"{name}: {len(values)} values for {len(self)} documents")
        return replace(self, columns={**self.columns, name: np.asarray(values)})

    def with_values(self, name: str, values: np.ndarray) -> TokenStore:
        """Return the store with ``values`` of every target, document after document.

        Args:
            name: under which Batches have them.
            values: ``[targets in all, ...]``.

        Raises:
            ValueError: there are more or fewer values than targets.
        """
        return replace(
            self, of_targets={**self.of_targets, name: TargetColumn.of(values, self.targets)}
        )

    def subset(self, indices: np.ndarray) -> TokenStore:
        """Return a store of some of the documents, over the same file.

        Args:
            indices: int64; whole items in their order, if there are items.
        """
        names = ("lengths", "targets", "rows", "hashes", "id_starts", "trained_starts", "row_kinds")
        columns = {name: values[indices] for name, values in self.columns.items()}
        of_targets = {name: column.subset(indices) for name, column in self.of_targets.items()}
        return replace(
            self,
            columns=columns,
            of_targets=of_targets,
            **{name: getattr(self, name)[indices] for name in names},
        )

    def split(self, share: float, seed: int) -> tuple[TokenStore, TokenStore]:
        """Return the documents in two, by seed: those to train on, and those held out.

        Equal rows stay on one side, and items whole; pieces of one row need not.

        Args:
            share: of the documents that is held out; at least one is.
            seed: decides which documents are held out.

        Raises:
            DataError: nothing is left to train on.
        """
        items = np.arange(len(self) + 1) if self.items is None else self.items
        rows = self.rows[items[:-1]]
        hashes = self.hashes[items[:-1]]
        piece = np.arange(len(rows)) - np.searchsorted(rows, rows)
        _, group = np.unique(
            hashes + piece.astype(np.uint64) * PIECE_MULTIPLIER, return_inverse=True
        )
        order = np.random.default_rng([seed, 1 << 32]).permutation(group.max(initial=-1) + 1)
        held_out = max(1, round(share * len(order)))
        if held_out >= len(order):
            raise DataError(
                f"validation_split={share}: leaves none of {len(order)} documents to train on"
            )
        is_held_out = np.repeat(np.isin(group, order[:held_out]), np.diff(items))
        return self.subset(np.flatnonzero(~is_held_out)), self.subset(np.flatnonzero(is_held_out))

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        """Return the store in a file that ``build_store`` wrote.

        Raises:
            DataError: the file is damaged.
        """
        meta = json.loads(path.with_suffix(".json").read_text())
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        reader = pa.ipc.open_file(content)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        places = [_documents_in(batch, content.address) for batch in batches]
        id_starts, trained_starts, lengths = np.concatenate(
            [np.zeros((3, 0), np.int64), *places], axis=1
        )
        ids = np.frombuffer(content, np.int32, content.size // 4)
        trained = np.frombuffer(content, np.uint8)
        for starts, column in ((id_starts, ids), (trained_starts, trained)):
            if (lengths < 0).any() or (starts < 0).any() or (starts + lengths > column.size).any():
                raise DataError(
                    f"{path}: its tokens do not lie in the file; delete it, and it will be built "
                    "again"
                )
        columns = {
            name: _joined(batches, name, np.int64)
            for name in ITEM_COLUMNS
            if name in reader.schema.names
        }
        return cls(
            path,
            lengths,
            _joined(batches, "targets", np.int64),
            _joined(batches, "row", np.int64),
            _joined(batches, "hash", np.uint64),
            DataReport.from_dict(meta["report"]),
            meta["max_id"],
            ids,
            trained,
            id_starts,
            trained_starts,
            columns=columns,
            row_kinds=_joined(batches, "kind", np.int8),
        )


def _documents_in(batch: pa.RecordBatch, address: int) -> np.ndarray:
    """Return where the documents of a batch lie in the file.

    Args:
        batch: a record batch of the file.
        address: of the file in memory.

    Returns:
        int64 ``[3, documents]``: beginning of the ids and of the mask, both in elements from the
        start of the file, and length.
    """
    starts = []
    lengths = []
    for column in batch.columns[:2]:
        offsets = _values(column.offsets, np.int32).astype(np.int64)
        elements = column.values
        first = (elements.buffers()[1].address - address) // elements.type.byte_width
        starts.append(first + elements.offset + offsets[:-1])
        lengths.append(np.diff(offsets))
    return np.stack([*starts, lengths[0]])


def _joined(batches: list[pa.RecordBatch], name: str, dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(_values(batch[name], dtype) for batch in batches)])


def _values(column: pa.Array, dtype: type) -> np.ndarray:
    """Return an array over a column, without a copy; ``to_numpy`` would import pandas."""
    return np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
