"""Columns of the data that are computed once and stored beside the tokens.

An objective declares them (``chronicals/objectives/terms.py``). Files lie in the cache beside the
token store. Their names are digests of the documents, the model, the settings and the precision, so
that another run finds them:

    DIGEST.NAME.safetensors     values of documents, a tensor for each column
    DIGEST.NAME/COLUMN.npy      values of targets ``[targets, ...]``, mapped into memory
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ConfigurationError
from chronicals.data import BatchStream, TokenStore
from chronicals.data.making.store import TargetColumn
from chronicals.distributed import Mesh
from chronicals.models import PresentedModel
from chronicals.objectives.terms import Columns
from chronicals.training.step.metrics import DeviceMoment

logger = logging.getLogger(__name__)

_DOCUMENT_NUMBER = "number"
"""Segment of a Batch: each document's index in its store, -1 for none."""

_ABANDONED_SECONDS = 3600.0
"""Age of the last write after which unfinished files belong to a killed process."""


@dataclass(frozen=True)
class ColumnSource:
    """Model and Batches that columns are computed from.

    Attributes:
        batches: makes the Batches of a store, each document once, this rank's part.
        computing: context, given the declaration and the tokens of the longest document: the
            model, ready to be called.
        seed: of the generator that ``Columns.compute`` gets.
        limited: context entered wherever processes wait for each other.
    """

    batches: Callable[[TokenStore], BatchStream]
    computing: Callable[[Columns, int], AbstractContextManager[PresentedModel]]
    device: torch.device
    seed: int
    ranks: Mesh
    limited: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    @torch.no_grad()
    def values(
        self, declared: Columns, store: TokenStore
    ) -> Iterator[tuple[np.ndarray, slice, tuple[Tensor, ...]]]:
        """Yield the values of this rank's documents, Batch after Batch.

        They are the document numbers of a Batch, int64 ``[N]``, -1 for none; a slice of its
        documents or targets; and the values of that slice, on the device.
        """
        numbered = store.with_column(_DOCUMENT_NUMBER, np.arange(len(store)))
        generator = torch.Generator(self.device).manual_seed(self.seed + self.ranks.rank)
        with self.computing(declared, store.longest) as model:
            earlier = DeviceMoment(self.device)
            for batch in self.batches(numbered):
                with self.limited():
                    numbers = batch.segments[_DOCUMENT_NUMBER].numpy()
                    moved: Batch = batch.to(self.device, non_blocking=True)
                    begin = 0
                    for values in declared.compute(model, moved, generator):
                        end = begin + len(values[0])
                        yield numbers, slice(begin, end), values
                        begin = end
                    earlier.wait()  # the host launches one Batch ahead
                earlier = DeviceMoment(self.device)


@dataclass(frozen=True)
class StoredColumns:
    """Adds the columns of a declaration to stores, from the cache or computed now."""

    declared: Columns
    source: ColumnSource
    identity: str

    def beside(self, store: TokenStore) -> TokenStore:
        """Return the store with the columns."""
        digest = hashlib.sha256(f"{store.key} {self.identity}".encode())
        for numbers in (store.id_starts, store.lengths):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        stem = f"{digest.hexdigest()[:32]}.{self.declared.name}"
        if self.declared.per == "target":
            folder = store.path.with_name(stem)
            if all(self.source.ranks.gather_values(folder.exists())):
                logger.info(
                    "%s: %s of %s targets read from %s",
                    self.declared.name,
                    self.declared.content,
                    f"{store.targets.sum():,}",
                    folder,
                )
            else:
                self._compute_targets(store, folder)
            for column in self.declared.columns:
                file = folder / f"{column.name}.npy"
                store = store.with_values(column.name, np.load(file, mmap_mode="r"))
            return store
        file = store.path.with_name(f"{stem}.safetensors")
        values = self._read(store, file)
        if values is None:
            values = self._compute(store, file)
        for column in self.declared.columns:
            store = store.with_column(column.name, values[column.name])
        return store

    # --- values of documents

    def _read(self, store: TokenStore, file: Path) -> dict[str, np.ndarray] | None:
        """Return the values that the first rank finds in the cache, on all ranks; or None."""
        columns = self.declared.columns

        def read() -> list[list] | None:
            try:
                tensors = load_file(file)
                return [tensors[column.name].tolist() for column in columns]
            except (OSError, SafetensorError, KeyError):
                return None

        lists = self.source.ranks.writer_does(read, OSError)
        if lists is None or any(len(values) != len(store) for values in lists):
            return None
        logger.info(
            "%s: %s of %d documents read from %s",
            self.declared.name,
            self.declared.content,
            len(store),
            file,
        )
        return {
            column.name: np.asarray(values, column.dtype) for column, values in zip(columns, lists)
        }

    def _compute(self, store: TokenStore, file: Path) -> dict[str, np.ndarray]:
        """Compute the values on all ranks, and write them on the first."""
        columns = self.declared.columns
        device = self.source.device
        count = len(store)
        totals = []
        for column in columns:
            dtype = torch.from_numpy(np.zeros(0, column.dtype)).dtype
            totals.append(torch.zeros((count + 1, *column.shape), dtype=dtype, device=device))
        logger.info(
            "%s: computing the %s of %d documents", self.declared.name, self.declared.content, count
        )
        for numbers, part, values in self.source.values(self.declared, store):
            row = np.where(numbers < 0, count, numbers)[part]  # the last row takes filler
            index = torch.from_numpy(row).to(device, non_blocking=True)
            for total, value in zip(totals, values):
                total.index_copy_(0, index, value.to(total.dtype))
        with self.source.limited():
            summed = [self.source.ranks.sum(total[:-1]).cpu().numpy() for total in totals]
        tensors = {column.name: values for column, values in zip(columns, summed)}

        def write() -> None:
            aside = file.with_suffix(f".{uuid.uuid4().hex[:8]}.aside")  # another run may write it
            try:
                save_file(tensors, aside)
                aside.replace(file)
            finally:
                aside.unlink(missing_ok=True)

        self.source.ranks.writer_does(write, OSError)
        return tensors

    # --- values of targets

    def _compute_targets(self, store: TokenStore, folder: Path) -> None:
        """Compute the values of targets into the files of a folder, on all ranks.

        Every rank writes the targets of its documents into the same files, and the folder gets its
        name when all are done.
        """
        targets = int(store.targets.sum())
        size = 0
        for column in self.declared.columns:
            size += np.dtype(column.dtype).itemsize * int(np.prod(column.shape)) * targets
        logger.info(
            "%s: computing %s of %s targets, %.2f GiB in %s",
            self.declared.name,
            self.declared.content,
            f"{targets:,}",
            size / 2**30,
            folder.parent,
        )

        def create() -> str:
            for left in folder.parent.glob(f"{folder.stem}.*.aside"):  # by a killed process
                with suppress(OSError):  # another process may be removing it
                    last_write = max(file.stat().st_mtime for file in (left, *left.iterdir()))
                    if time.time() - last_write > _ABANDONED_SECONDS:
                        shutil.rmtree(left)
            # Another run may be computing the same, so the name is unique.
            aside = folder.with_suffix(f".{uuid.uuid4().hex[:8]}.aside")
            free = shutil.disk_usage(folder.parent).free
            if free < size:
                raise ConfigurationError(
                    f"{self.declared.setting}: {size / 2**30:.1f} GiB are needed for "
                    f"{targets:,} targets, and {folder.parent} has {free / 2**30:.1f} GiB free; "
                    "ask for less, or set cache_dir to a larger disk"
                )
            aside.mkdir()
            for column in self.declared.columns:
                shape = (targets, *column.shape)
                np.lib.format.open_memmap(aside / f"{column.name}.npy", "w+", column.dtype, shape)
            return aside.name

        aside = folder.with_name(self.source.ranks.writer_does(create, ConfigurationError))

        def rename() -> None:
            try:
                aside.rename(folder)
            except OSError:
                if not folder.exists():  # else another run has computed the same meanwhile
                    raise

        try:
            self._fill(store, aside)
            self.source.ranks.writer_does(rename, OSError)
        finally:
            if self.source.ranks.writer:
                shutil.rmtree(aside, ignore_errors=True)

    def _fill(self, store: TokenStore, aside: Path) -> None:
        """Write this rank's targets into the files, and wait until all ranks have."""
        paths = [aside / f"{column.name}.npy" for column in self.declared.columns]
        if not all(self.source.ranks.gather_values(paths[0].exists())):
            raise ConfigurationError(
                f"{self.declared.setting}: {aside.parent} is not the same folder on all machines; "
                "set cache_dir to one that is"
            )
        files = [np.load(path, mmap_mode="r+") for path in paths]
        places = TargetColumn.of(np.empty(int(store.targets.sum()), bool), store.targets)
        for numbers, part, values in self.source.values(self.declared, store):
            rows = places.rows(numbers[numbers >= 0])[part]
            for file, value in zip(files, values):
                file[rows] = value.cpu().numpy()
        for file in files:
            file.flush()
        self.source.ranks.gather_values(True)
