"""Columns that the trained model computes as a run begins, and the run's record of that model.

The model computes them once it is prepared, before a checkpoint's weights are loaded.
``reference.json`` in the run's folder describes the model that the run began with, with which a
resumed run is compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from chronicals.config import ConfigurationError
from chronicals.data import BatchStream, TokenStore
from chronicals.distributed.rank_agreement import fingerprint_over
from chronicals.lora import adapters, adapters_are_fresh
from chronicals.models import PresentedModel, in_evaluation
from chronicals.objectives.terms import Columns, ReferenceRecord
from chronicals.training.columns.stored_columns import ColumnSource, StoredColumns
from chronicals.training.errors import CheckpointError
from chronicals.training.loading import LOADED_FROM
from chronicals.training.session import Session

logger = logging.getLogger(__name__)

REFERENCE_FILE = "reference.json"
"""File in a run's folder: the model that the run began with, and its reference policy."""

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
        source = ColumnSource(
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
            store = StoredColumns(declared, source, identity).beside(store)
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
