"""What a teacher predicts for every target of the data: computed once, before a run, and kept.

Each target keeps k tokens, its likeliest ones or ones drawn by the teacher's probabilities, with
their log-probabilities. They lie in the cache, named by the documents, the teacher and k, and are
mapped into memory: while the run goes on there is no teacher. A target takes 8 k bytes of disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import BatchStream, TokenStore, filler_token
from chronicals.data.making.target_columns import TargetColumn
from chronicals.distributed import Mesh
from chronicals.models import PresentedModel, embedding_table, input_device
from chronicals.objectives import Objective
from chronicals.objectives.distill import STORED_IDS, STORED_LOG_P, Distill
from chronicals.training.frozen import (
    check_frozen_positions,
    frozen_attending,
    made_ready,
    release_frozen,
)

logger = logging.getLogger(__name__)

NUMBER = "number"
"""Column of a document's place in its store."""

KINDS = {STORED_IDS: np.int32, STORED_LOG_P: np.float32}
"""The columns of a store, a file of each in its folder of the cache."""

LEFT = 3600.0
"""Seconds after which predictions to which nothing was written are taken for those of a process
that was killed.
"""


def with_predictions(
    stores: list[TokenStore],
    objective: Objective,
    model: Any,
    tokenizer: Any,
    config: ChronicalsConfig,
    ranks: Mesh | None = None,
) -> list[TokenStore]:
    """The stores with a teacher's predictions, or as they are where the objective stores none.

    Call it before the model is made ready to train: while predictions are computed, the teacher is
        on its device too.

    Raises:
        ConfigurationError: the teacher cannot be had, does not fit, or the cache is not one of all
            machines.
    """
    if not isinstance(objective, Distill) or objective.settings.stored_tokens is None:
        return stores
    ranks = ranks or Mesh()
    made = _Predictions(objective, model, tokenizer, config, ranks)
    try:
        return [made.beside(store) for store in stores]
    finally:
        release_frozen(objective)


class _Predictions:
    """Of the teacher of an objective, for one store after another; the teacher is loaded when
    the first is not found.
    """

    def __init__(
        self, objective: Distill, model: Any, tokenizer: Any, config: ChronicalsConfig, ranks: Mesh
    ):
        self.objective = objective
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.ranks = ranks
        self.rows = embedding_table(model).shape[0]
        saved = objective.saved_teacher(tokenizer)
        objective.vocabulary = min(
            self.rows, saved.embedding_rows(objective.settings.trust_remote_code)
        )
        given = objective.settings
        drawn = [given.temperature, config.seed] if given.stored == "drawn" else []
        self.about = json.dumps(
            [
                saved.identity(),
                given.teacher_precision,
                given.stored_tokens,
                given.stored,
                objective.vocabulary,
                *drawn,
            ]
        )

    def beside(self, store: TokenStore) -> TokenStore:
        """The store with its predictions, from the cache or computed now."""
        folder = self._folder(store)
        if all(self.ranks.gather_values(folder.exists())):
            logger.info(
                "teacher: predictions of %s targets read from %s",
                f"{store.targets.sum():,}",
                folder,
            )
        else:
            self._compute(store, folder)
        for name in KINDS:
            store = store.with_values(name, np.load(folder / f"{name}.npy", mmap_mode="r"))
        return store

    def _folder(self, store: TokenStore) -> Path:
        """In the cache, beside the store."""
        digest = hashlib.sha256(f"{store.key} {self.about}".encode())
        for column in (store.id_starts, store.lengths):
            digest.update(np.ascontiguousarray(column).tobytes())
        return store.path.with_name(f"{digest.hexdigest()[:32]}.teacher")

    def _compute(self, store: TokenStore, folder: Path) -> None:
        """Every rank writes the targets of its documents into the same files, which get their
        name when all are done.
        """
        targets = int(store.targets.sum())
        k = self.objective.settings.stored_tokens
        size = sum(np.dtype(kind).itemsize for kind in KINDS.values()) * k * targets
        logger.info(
            "teacher: computing predictions of %s targets, %.2f GiB in %s",
            f"{targets:,}",
            size / 2**30,
            folder.parent,
        )

        def create() -> str:
            _remove_left(folder)
            aside = folder.with_suffix(
                f".{uuid.uuid4().hex[:8]}.aside"
            )  # another run may be computing the same
            if (free := shutil.disk_usage(folder.parent).free) < size:
                raise ConfigurationError(
                    f"distill.stored_tokens={k}: {size / 2**30:.1f} GiB are needed for "
                    f"{targets:,} targets, and "
                    f"{folder.parent} has {free / 2**30:.1f} GiB free; take fewer, or another "
                    "cache_dir"
                )
            aside.mkdir()
            for name, kind in KINDS.items():
                np.lib.format.open_memmap(aside / f"{name}.npy", "w+", kind, (targets, k))
            return aside.name

        aside = folder.with_name(self.ranks.writer_does(create, ConfigurationError))
        try:
            self._fill(store, aside)
            self.ranks.writer_does(lambda: _rename(aside, folder), OSError)
        finally:
            if self.ranks.writer:
                shutil.rmtree(aside, ignore_errors=True)

    def _fill(self, store: TokenStore, aside: Path) -> None:
        """Write this rank's part of the files there; returns when all ranks have."""
        if not all(self.ranks.gather_values((aside / f"{STORED_IDS}.npy").exists())):
            raise ConfigurationError(
                f"distill.stored_tokens={self.objective.settings.stored_tokens}: {aside.parent} "
                "is not the same folder on all "
                "machines; set cache_dir to one that is"
            )
        files = [np.load(aside / f"{name}.npy", mmap_mode="r+") for name in KINDS]
        for rows, found in self._predicted(store):
            for file, values in zip(files, found):
                file[rows] = values.cpu().numpy()
        for file in files:
            file.flush()
        self.ranks.gather_values(True)

    @torch.no_grad()
    def _predicted(self, store: TokenStore) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor]]]:
        """Rows of the store's targets, and ids and log-probabilities for them, of this rank's
        documents.
        """
        teacher = self._teacher(store.longest)
        column = TargetColumn.of(np.empty(int(store.targets.sum()), bool), store.targets)
        stream = BatchStream(
            store.with_column(NUMBER, np.arange(len(store))),
            self.config,
            filler_token(self.tokenizer, self.rows),
            epochs=1,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
            shuffle=False,
        )
        device = input_device(self.model)
        drawing = torch.Generator(device).manual_seed(self.config.seed + self.ranks.rank)
        with frozen_attending(self.objective), torch.autocast(device.type, enabled=False):
            for batch in stream:
                numbers = batch.segments[NUMBER].numpy()
                rows = column.rows(numbers[numbers >= 0])
                for part, logits in _logits(teacher, batch.to(device), self.objective):
                    yield rows[part], self.objective.kept(logits, drawing)

    def _teacher(self, longest: int) -> PresentedModel:
        if not self.objective.frozen:
            made_ready(
                self.objective, self.objective.teacher(self.tokenizer), self.model, self.config
            )
            check_frozen_positions(self.objective, longest)
        return next(iter(self.objective.frozen.values()))


def _logits(
    teacher: PresentedModel, batch: Batch, objective: Distill
) -> Iterator[tuple[slice, Tensor]]:
    """Logits at a Batch's targets in their order, so many rows at a time as the objective
    allows, over the common ids.
    """
    at = batch.targets != IGNORED
    head = teacher.head
    states = (teacher.logits(batch) if head is None else teacher.hidden_states(batch))[at]
    for first in range(0, len(states), objective.chunk_size):
        part = slice(first, first + objective.chunk_size)
        logits = states[part] if head is None else head.logits(states[part])
        yield part, logits[:, : objective.vocabulary]


def _rename(aside: Path, folder: Path) -> None:
    """Another run may have made the same meanwhile."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _remove_left(folder: Path) -> None:
    """What a process that was killed left of the same predictions: nothing was written to it for
    long.
    """
    for aside in folder.parent.glob(f"{folder.stem}.*.aside"):
        with suppress(OSError):  # another process may be at it
            if time.time() - max(file.stat().st_mtime for file in (aside, *aside.iterdir())) > LEFT:
                shutil.rmtree(aside)
