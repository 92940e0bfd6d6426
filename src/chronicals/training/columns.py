"""Columns of the data that an objective needs before a run.

They are computed once, cached, and checked when the run is resumed.

An objective declares them (``chronicals/objectives/columns.py``). A frozen model computes its
columns before the trained model is prepared; the trained model computes its own once it is
prepared, before a checkpoint's weights are loaded. Files lie in the cache beside the token store.
Their names are digests of the documents, the model, the settings and the precision, so that another
run finds them:

    DIGEST.NAME.safetensors     values of documents, a tensor for each column
    DIGEST.NAME/COLUMN.npy      values of targets ``[targets, ...]``, mapped into memory

``reference.json`` in the run's folder describes the model that the run began with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import BatchStream, TokenStore, filler_token
from chronicals.data.making.target_columns import TargetColumn
from chronicals.distributed import Mesh
from chronicals.distributed.rank_agreement import fingerprint_over
from chronicals.lora import adapters, adapters_are_fresh
from chronicals.models import (
    PresentedModel,
    check_positions,
    embedding_table,
    in_evaluation,
    input_device,
)
from chronicals.objectives import Objective
from chronicals.objectives.columns import Columns, ReferenceRecord
from chronicals.training.errors import CheckpointError
from chronicals.training.frozen import frozen_attending, present_frozen
from chronicals.training.loading import LOADED_FROM
from chronicals.training.metrics import Moment
from chronicals.training.session import Session

logger = logging.getLogger(__name__)

REFERENCE_FILE = "reference.json"
"""File in a run's folder: the model that the run began with, and its reference policy."""

_DOCUMENT_NUMBER = "number"
"""Segment of a Batch: each document's index in its store, -1 for none."""

_ABANDONED_SECONDS = 3600.0
"""Age of the last write after which unfinished files belong to a killed process."""

_NEUTRAL_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "architectures",
        "dtype",
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "auto_map",
    }
)
"""Keys of a model's configuration that do not change what given weights compute."""


def with_frozen_columns(
    stores: list[TokenStore],
    objective: Objective,
    model: Any,
    tokenizer: Any,
    config: ChronicalsConfig,
    ranks: Mesh | None = None,
) -> list[TokenStore]:
    """Return the stores with the columns that the objective's frozen models compute.

    Call it before ``model`` is prepared: a frozen model needs memory beside it. The frozen models
    are loaded only if a file is missing, and are released at the end.

    Raises:
        ConfigurationError: a frozen model cannot be loaded or does not fit, or the cache is not on
            a disk that all machines share.
    """
    declarations = objective.frozen_columns(model, tokenizer, config)
    ranks = ranks or Mesh()
    rows = embedding_table(model).shape[0]

    def batches(store: TokenStore) -> BatchStream:
        return BatchStream(
            store,
            config,
            filler_token(tokenizer, rows),
            epochs=1,
            rank=ranks.rank,
            ranks=ranks.count,
            shuffle=False,
        )

    @contextmanager
    def computing(declared: Columns, longest: int) -> Iterator[PresentedModel]:
        if declared.name not in objective.frozen:
            assert declared.load is not None
            present_frozen(objective, {declared.name: declared.load()}, model, config)
            check_positions(objective.frozen[declared.name].model, longest)
        device = input_device(model)
        with frozen_attending(objective), torch.autocast(device.type, enabled=False):
            yield objective.frozen[declared.name]

    source = _Source(batches, computing, input_device(model), config.seed, ranks)
    for declared in declarations:
        cached = _CachedColumns(declared, source, json.dumps(declared.identity))
        try:
            stores = [cached.beside(store) for store in stores]
        finally:
            objective.frozen.pop(declared.name, None)
    return stores


class StartColumns:
    """Columns that the trained model computes as the run begins, and the record of that model.

    Args:
        session: prepared, before a checkpoint's weights are loaded.
        batches: makes the Batches of a store, each document once, this rank's part.
        limited: context entered wherever processes wait for each other.

    Attributes:
        record: how the run has its reference policy; None if the objective has none.
    """

    def __init__(
        self,
        session: Session,
        batches: Callable[[TokenStore], BatchStream],
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        model = session.model
        self.session = session
        self.batches = batches
        self.limited = limited
        self.declared = session.objective.start_columns(model)
        # Removed, since the run changes the model.
        loaded_from = vars(model).pop(LOADED_FROM, None)
        self.policy = session.objective.reference_policy(model, loaded_from, session.config)
        self.record: ReferenceRecord | None = None if self.policy is None else self.policy.record
        self.facts: dict[str, Any] = {}
        if self.declared:
            self.facts = _facts_of_start(session)
        elif self.policy is not None:
            self.facts["last_weights"] = fingerprint_over(self.policy.weights, session.ranks).values
            config = session.config
            # On these depend the weights in memory, beside the model's files.
            self.facts["held_as"] = [
                session.precision.device.type,
                config.quantization,
                config.mixed_precision,
                config.use_fp8,
                config.use_fused_kernels,
                sorted(config.memory or ()),
            ]

    def write_or_compare(self, output_dir: Path, resumed: Path | None) -> None:
        """Write ``reference.json`` to a new run's folder; compare a resumed run with it.

        Args:
            output_dir: folder of the run.
            resumed: checkpoint that the run resumes from, in this folder or another run's.

        Raises:
            CheckpointError: the run began with another model or another reference policy.
        """
        if self.declared or self.policy is not None:
            self.record = self.session.ranks.writer_does(
                lambda: self._write_or_compare(output_dir, resumed), CheckpointError
            )

    def _write_or_compare(self, output_dir: Path, resumed: Path | None) -> ReferenceRecord | None:
        """Return the record that the run began with."""
        file = None if resumed is None else resumed.parent.parent / REFERENCE_FILE
        if file is None or not file.exists():
            if resumed is not None:
                logger.warning(
                    "reference: there is no %s beside %s, so it is not compared with that of "
                    "before",
                    REFERENCE_FILE,
                    resumed,
                )
            output_dir.mkdir(parents=True, exist_ok=True)
            facts = {**self.facts, "reference": self.record}
            (output_dir / REFERENCE_FILE).write_text(json.dumps(facts))
            return self.record
        earlier = json.loads(file.read_text())
        record: ReferenceRecord | None = earlier.get("reference", self.record)
        if self.policy is not None and record is not None:
            difference = self.policy.difference(record)
            if difference is not None:
                raise CheckpointError(f"{file}: {difference}")
        compared = {"weights", "model", "scales", "active"}
        if earlier.get("divided") == self.facts.get("divided"):
            compared.add("places")
        if earlier.get("held_as") == self.facts.get("held_as"):
            compared.add("last_weights")
        compared &= earlier.keys() & self.facts.keys()
        if any(earlier[name] != self.facts[name] for name in compared):
            raise CheckpointError(
                f"{file}: the run's reference policy is the model that it began with, and this is "
                "another one; resume with the "
                "model that the run began with, and beside the same reference_model if one was "
                "named"
            )
        if file.parent != output_dir:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / REFERENCE_FILE).write_text(json.dumps(earlier))
        return record

    def beside(self, store: TokenStore) -> TokenStore:
        """Return the store with the columns."""
        session = self.session
        config = session.config
        source = _Source(
            self.batches,
            self._computing,
            session.precision.device,
            config.seed,
            session.ranks,
            self.limited,
        )
        facts = json.dumps(self.facts, sort_keys=True)
        for declared in self.declared:
            identity = f"{facts} {config.mixed_precision} {config.use_fp8}"
            if declared.identity is not None:
                identity = f"{identity} {json.dumps(declared.identity)}"
            store = _CachedColumns(declared, source, identity).beside(store)
        return store

    @contextmanager
    def _computing(self, declared: Columns, longest: int) -> Iterator[PresentedModel]:
        session = self.session
        if declared.per == "target" and session.ranks.context is not None:
            raise ConfigurationError(
                f"context_parallel={session.config.context_parallel}: the targets of a document "
                f"are split over processes, and {declared.content} of targets are computed of "
                "whole documents; leave context_parallel out"
            )
        with (
            session.presented.attending_documents(),
            in_evaluation(session.model),
            session.precision.autocast(),
        ):
            yield session.presented


@dataclass(frozen=True)
class _Source:
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
            earlier = Moment(self.device)
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
                earlier = Moment(self.device)


class _CachedColumns:
    """Adds the columns of a declaration to stores, from the cache or computed now."""

    def __init__(self, declared: Columns, source: _Source, identity: str):
        self.declared = declared
        self.source = source
        self.ranks = source.ranks
        self.identity = identity

    def beside(self, store: TokenStore) -> TokenStore:
        """Return the store with the columns."""
        if self.declared.per == "target":
            folder = store.path.with_name(self._stem(store))
            if all(self.ranks.gather_values(folder.exists())):
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
        values = self._read(store)
        if values is None:
            values = self._compute(store)
        for column in self.declared.columns:
            store = store.with_column(column.name, values[column.name])
        return store

    def _stem(self, store: TokenStore) -> str:
        """Return the digest that names the files of a store, with the declaration's name."""
        digest = hashlib.sha256(f"{store.key} {self.identity}".encode())
        for numbers in (store.id_starts, store.lengths):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        return f"{digest.hexdigest()[:32]}.{self.declared.name}"

    # --- values of documents

    def _read(self, store: TokenStore) -> dict[str, np.ndarray] | None:
        """Return the values that the first rank finds in the cache, on all ranks; or None."""
        file = store.path.with_name(f"{self._stem(store)}.safetensors")
        columns = self.declared.columns

        def read() -> list[list] | None:
            try:
                tensors = load_file(file)
                return [tensors[column.name].tolist() for column in columns]
            except (OSError, SafetensorError, KeyError):
                return None

        lists = self.ranks.writer_does(read, OSError)
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

    def _compute(self, store: TokenStore) -> dict[str, np.ndarray]:
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
            summed = [self.ranks.sum(total[:-1]).cpu().numpy() for total in totals]
        tensors = {column.name: values for column, values in zip(columns, summed)}

        def write() -> None:
            file = store.path.with_name(f"{self._stem(store)}.safetensors")
            aside = file.with_suffix(f".{uuid.uuid4().hex[:8]}.aside")  # another run may write it
            try:
                save_file(tensors, aside)
                aside.replace(file)
            finally:
                aside.unlink(missing_ok=True)

        self.ranks.writer_does(write, OSError)
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

        aside = folder.with_name(self.ranks.writer_does(create, ConfigurationError))

        def rename() -> None:
            try:
                aside.rename(folder)
            except OSError:
                if not folder.exists():  # else another run has computed the same meanwhile
                    raise

        try:
            self._fill(store, aside)
            self.ranks.writer_does(rename, OSError)
        finally:
            if self.ranks.writer:
                shutil.rmtree(aside, ignore_errors=True)

    def _fill(self, store: TokenStore, aside: Path) -> None:
        """Write this rank's targets into the files, and wait until all ranks have."""
        paths = [aside / f"{column.name}.npy" for column in self.declared.columns]
        if not all(self.ranks.gather_values(paths[0].exists())):
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
        self.ranks.gather_values(True)


# --- the model that a run began with


def _facts_of_start(session: Session) -> dict[str, Any]:
    """Return what the trained model's predictions depend on, as JSON.

    Beside weights and configuration these are the factors of the adapters' products, ours and
    PEFT's, in the order of the layers, and for each layer with adapters of PEFT which are active,
    whether they are switched off, and which are merged.
    """
    model = session.model
    # Fresh adapters have no effect yet, and begin otherwise with another seed.
    fresh = adapters_are_fresh(model)
    weights = fingerprint_over(
        (p for name, p in model.named_parameters() if not (fresh and ".lora_" in name)),
        session.ranks,
    )
    scales: list[Any] = []
    if not fresh:
        scales += [layer.scale for _, layer in adapters(model)]
    active = []
    for module in model.modules():
        layer: Any = module
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, dict):  # no layer with adapters of PEFT
            continue
        if not fresh:
            scales.append([list(item) for item in sorted(scaling.items())])
        disabled = bool(layer.disable_adapters)
        active.append([list(layer.active_adapters), disabled, list(layer.merged_adapters)])
    return {
        "weights": weights.values,
        "places": weights.places,
        "divided": weights.divided,
        "model": model_config_digest(model.config),
        "scales": scales,
        "active": active,
    }


def model_config_digest(config: Any) -> str:
    """Return a digest of the keys of a model's configuration that its predictions depend on."""

    def without_neutral_keys(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            str(name): without_neutral_keys(inner)
            for name, inner in value.items()
            if name not in _NEUTRAL_CONFIG_KEYS
        }

    text = json.dumps(without_neutral_keys(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
