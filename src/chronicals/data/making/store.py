"""Token store: an Arrow IPC file, memory-mapped, named by the hash of everything that made it.

One row a document: ``ids`` (list of int32), ``trained`` (list of bool as uint8), how many of its
positions predict a trained token (``targets``), the number of the ``row`` it came from, a ``hash``
of that row's tokens, and the ``kind`` of that row. Documents that belong together, as the two
answers of a preference do, follow each other as one *item*; further columns say which place a
document has in its item (``side``), how many tokens of their common prompt stand before it
(``shared``), and how the row judges its answer (``label``). The gate's report lies beside it as
JSON. A store is written aside and renamed, so what has the name is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from chronicals.data.kinds.rows import CHAT_KINDS, ROW_KINDS
from chronicals.data.making.documents import MISMATCHED, UNJUDGED
from chronicals.data.making.shared_prompts import IS_SHARED, SHARED
from chronicals.data.making.target_columns import TargetColumn
from chronicals.data.reading.gate import DataError, DataReport
from chronicals.data.reading.ledger import Ledger

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),
        ("trained", pa.list_(pa.uint8())),
        ("targets", pa.int64()),
        ("row", pa.int64()),
        ("hash", pa.uint64()),
        ("kind", pa.int8()),
    ]
)

SIDE = "side"
"""Column of a document's place in its item, int64 from 0: an item begins at each 0. Without it
every document is an item.
"""

LABEL = "label"
"""Column: 1 where a row calls its answer good, 0 where bad, -1 where it says nothing."""

OF_ITEMS = (SIDE, SHARED, LABEL)
"""Columns of a store whose rows may become several documents, in their order in the file."""

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
        columns: further values ``[documents]`` by name, segments of Batches: ``side``, and what
            ``with_column`` adds.
        of_targets: further values of the targets by name, columns of Batches: what ``with_values``
            adds.
        row_kinds: int8 ``[documents]``, the kind of each one's row, by its place in ``ROW_KINDS``.
        ledger: what became of the rows that were read, where this store is what was kept of them.
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
        """Tokens of the longest document, those of a shared prompt before it included; 0 without
        any.
        """
        return int((self.lengths + self.before).max(initial=0))

    @property
    def before(self) -> np.ndarray:
        """int64 ``[documents]``, tokens of a shared prompt before each."""
        return (
            np.maximum(self.columns[SHARED], 0)
            if SHARED in self.columns
            else np.zeros(len(self), np.int64)
        )

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def kinds(self) -> list[str]:
        """The kinds of row in whose form documents are trained: of pairs those of their answers."""
        return sorted(self.report.forms)

    @property
    def rows_by_kind(self) -> dict[str, int]:
        """How many rows of each kind the documents come from."""
        _, first = np.unique(self.rows, return_index=True)
        counts = np.bincount(self.row_kinds[first], minlength=len(ROW_KINDS)).tolist()
        return {kind: count for kind, count in zip(ROW_KINDS, counts, strict=True) if count}

    @property
    def chats(self) -> bool:
        """Whether any row went through the chat template."""
        return any(kind in CHAT_KINDS for kind in self.report.forms)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and mask (uint8) of a document, as views of the file."""
        first = self.id_starts[index]
        first_trained = self.trained_starts[index]
        length = self.lengths[index]
        return self.ids[first : first + length], self.trained[
            first_trained : first_trained + length
        ]

    @property
    def tokens_shared(self) -> int:
        """Tokens that documents have before them and that are there once, for all of an item's."""
        return (
            int(self.before.sum() - self.lengths[self.columns[SHARED] == IS_SHARED].sum())
            if SHARED in self.columns
            else 0
        )

    @property
    def prompts(self) -> int:
        """How many documents are prompts that the answers of an item share."""
        return int((self.columns[SHARED] == IS_SHARED).sum())

    @property
    def mismatched(self) -> int:
        """How many documents are answers to another prompt, beside judged ones."""
        return int(((self.columns[SIDE] == MISMATCHED) & (self.columns[LABEL] != UNJUDGED)).sum())

    def is_prompt(self, index: int) -> bool:
        """Whether a document is the prompt that the answers of its item share."""
        return SHARED in self.columns and bool(self.columns[SHARED][index] == IS_SHARED)

    def whole_document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """As ``document``, with the shared prompt in front of it."""
        ids, trained = self.document(index)
        if not self.before[index]:
            return ids, trained
        end = index + int(np.argmax(self.columns[SHARED][index:] < 0))
        prompt, untrained = self.document(end)
        return np.concatenate([prompt, ids]), np.concatenate([untrained, trained])

    @property
    def items(self) -> np.ndarray | None:
        """int64 ``[items + 1]``: item i is the documents ``items[i]:items[i + 1]``; None where
        every document is one.
        """
        if SIDE not in self.columns:
            return None
        return np.append(np.flatnonzero(self.columns[SIDE] == 0), len(self))

    def with_column(self, name: str, values: np.ndarray) -> TokenStore:
        """The store with one more value for each document, such as a reference model's
        log-probability (float32) or ``weight``, by which the loss of each of its targets is
        multiplied.

        Raises:
            ValueError: there are more or fewer values than documents.
        """
        if len(values) != len(self):
            raise ValueError(f"{name}: {len(values)} values for {len(self)} documents")
        return replace(self, columns={**self.columns, name: np.asarray(values)})

    def with_values(self, name: str, values: np.ndarray) -> TokenStore:
        """The store with values ``[targets in all, ...]`` of every target, document after document.

        Raises:
            ValueError: there are more or fewer values than targets.
        """
        return replace(
            self, of_targets={**self.of_targets, name: TargetColumn.of(values, self.targets)}
        )

    def subset(self, indices: np.ndarray) -> TokenStore:
        """A store of some of the documents, over the same file; whole items in their order,
        where there are such.
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
        """The documents in two, by seed: those to train on, and ``share`` of them (at least one)
        held out.

        Equal rows stay on one side, and items whole; pieces of one row need not.
        """
        items = np.arange(len(self) + 1) if self.items is None else self.items
        rows = self.rows[items[:-1]]
        hashes = self.hashes[items[:-1]]
        piece = np.arange(len(rows)) - np.searchsorted(rows, rows)
        _, group = np.unique(hashes + piece.astype(np.uint64) * ODD, return_inverse=True)
        order = np.random.default_rng([seed, 1 << 32]).permutation(group.max(initial=-1) + 1)
        held = max(1, round(share * len(order)))
        if held >= len(order):
            raise DataError(
                f"validation_split={share}: leaves none of {len(order)} documents to train on"
            )
        apart = np.repeat(np.isin(group, order[:held]), np.diff(items))
        return self.subset(np.flatnonzero(~apart)), self.subset(np.flatnonzero(apart))

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        """The store in a file that ``build`` wrote."""
        meta = json.loads(path.with_suffix(".json").read_text())
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        reader = pa.ipc.open_file(content)
        found = [
            _documents_in(reader.get_batch(n), content.address)
            for n in range(reader.num_record_batches)
        ]
        id_starts, trained_starts, lengths = np.concatenate(
            [np.zeros((3, 0), np.int64), *found], axis=1
        )
        ids = np.frombuffer(content, np.int32, content.size // 4)
        trained = np.frombuffer(content, np.uint8)
        for starts, column in ((id_starts, ids), (trained_starts, trained)):
            if (lengths < 0).any() or (starts < 0).any() or (starts + lengths > column.size).any():
                raise DataError(
                    f"{path}: its tokens do not lie in the file; delete it, and it will be built "
                    "again"
                )
        batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
        kinds = ("targets", np.int64), ("row", np.int64), ("hash", np.uint64)
        targets, rows, hashes = (_joined(batches, *kind) for kind in kinds)
        row_kinds = _joined(batches, "kind", np.int8)
        columns = {
            name: _joined(batches, name, np.int64)
            for name in OF_ITEMS
            if name in reader.schema.names
        }
        return cls(
            path,
            lengths,
            targets,
            rows,
            hashes,
            DataReport.from_dict(meta["report"]),
            meta["max_id"],
            ids,
            trained,
            id_starts,
            trained_starts,
            columns=columns,
            row_kinds=row_kinds,
        )


def _documents_in(batch: pa.RecordBatch, address: int) -> np.ndarray:
    """Begin of the ids, begin of the mask (both in elements from the start of the file, at
    ``address``), and length.
    """
    ids, trained = batch.columns[:2]
    offsets, trained_offsets = (
        _values(column.offsets, np.int32).astype(np.int64) for column in (ids, trained)
    )
    first, first_trained = (
        (column.values.buffers()[1].address - address) // column.values.type.byte_width
        + column.values.offset
        for column in (ids, trained)
    )
    return np.stack([first + offsets[:-1], first_trained + trained_offsets[:-1], np.diff(offsets)])


def _joined(batches: list[pa.RecordBatch], name: str, dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(_values(batch[name], dtype) for batch in batches)])


def _values(column: pa.Array, dtype: type) -> np.ndarray:
    """Without a copy, and without pandas, which ``to_numpy`` would import."""
    return np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
