"""Token store: an Arrow IPC file, memory-mapped, named by the hash of everything that made it.

One row a document: ``ids`` (list of int32), ``trained`` (list of bool as uint8), the number of the ``row`` it came from,
and a ``hash`` of that row's tokens. The gate's report lies beside it as JSON. A store is written aside and renamed, so what has
the name is whole.
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
    [("ids", pa.list_(pa.int32())), ("trained", pa.list_(pa.uint8())), ("row", pa.int64()), ("hash", pa.uint64())]
)


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
        max_id: largest token id.
    """

    path: Path
    lengths: np.ndarray
    targets: np.ndarray
    rows: np.ndarray
    hashes: np.ndarray
    report: DataReport
    max_id: int
    _batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(repr=False)
    _first: np.ndarray = field(repr=False)
    _index: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

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
        place = int(index if self._index is None else self._index[index])
        batch = int(np.searchsorted(self._first, place, side="right")) - 1
        (offsets, ids, trained), row = self._batches[batch], place - self._first[batch]
        span = slice(offsets[row], offsets[row + 1])
        return ids[span], trained[span]

    def subset(self, indices: np.ndarray) -> TokenStore:
        """A store of some of the documents, over the same file."""
        return replace(
            self,
            lengths=self.lengths[indices],
            targets=self.targets[indices],
            rows=self.rows[indices],
            hashes=self.hashes[indices],
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
            batches, columns = [], [[np.zeros(0, np.int64)] * 3 + [np.zeros(0, np.uint64)]]
            for number in range(reader.num_record_batches):
                ids, trained, row, digest = reader.get_batch(number).columns
                offsets = ids.offsets.to_numpy().astype(np.int64)
                mask = trained.values.to_numpy()
                running = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
                targets = running[offsets[1:]] - running[offsets[:-1]] - mask[offsets[:-1]]
                columns.append([np.diff(offsets), targets, row.to_numpy(), digest.to_numpy()])
                batches.append((offsets, ids.values.to_numpy(), mask))
        first = np.cumsum([len(lengths) for lengths, *_ in columns])[:-1]
        lengths, targets, rows, hashes = (np.concatenate(column) for column in zip(*columns, strict=True))
        report = DataReport.from_dict(meta["report"])
        return cls(path, lengths, targets, rows, hashes, report, meta["max_id"], batches, first)
