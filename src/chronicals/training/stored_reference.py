"""Log-probabilities of every document under the model as a run begins, computed once and kept.

They are a column of the data. On disk they lie in the cache, named by the documents, the model's
weights, its configuration, the scales of its adapters and the precision, so another run from the
same model over the same data reads them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from chronicals.batch import Batch
from chronicals.data import BatchStream, TokenStore
from chronicals.lora import adapters, adapters_are_fresh
from chronicals.models import PresentedModel, in_evaluation
from chronicals.objectives.log_probabilities import document_sums, score_tokens
from chronicals.objectives.reference import REFERENCE, WithReference
from chronicals.training.errors import CheckpointError
from chronicals.training.metrics import Moment
from chronicals.training.rank_agreement import fingerprint_over
from chronicals.training.reference_record import Record, difference, record_of
from chronicals.training.session import Session

logger = logging.getLogger(__name__)

NUMBER = "number"
"""Column of a document's place in its store."""

KEPT = "reference.json"
"""File of a run's folder that says what its reference is, and of which model it was computed."""

LOOKED_AT = 16
"""Parameters that tell a reference from another one: those of its last layer, and the head."""

CHANGES_NOTHING = frozenset(
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
"""Keys of a model's configuration that its log-probabilities do not depend on, the weights being
given.
"""


class StoredReference:
    """Gives stores the column that an objective compares with, where it stores its reference.

    Args:
        session: as the run begins: before a checkpoint's weights are loaded.
        stream: makes the Batches of a store, each document once, this rank's part.
        limited: entered where processes wait for each other.
    """

    def __init__(
        self,
        session: Session,
        stream: Callable[[TokenStore], BatchStream],
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.session = session
        self.stream = stream
        self.limited = limited
        objective = session.objective
        self.facts: dict[str, Any] = {}
        self.wanted = isinstance(objective, WithReference) and objective.stores_reference(
            session.model
        )
        self.record = record_of(objective, session.model, session.config)
        if self.wanted:
            fresh = adapters_are_fresh(
                session.model
            )  # then they change nothing yet, and start otherwise with another seed
            named = session.model.named_parameters()
            own = (p for name, p in named if not (fresh and ".lora_" in name))
            weights = fingerprint_over(own, session.ranks)
            self.facts = {
                "weights": weights.values,
                "places": weights.places,
                "divided": weights.divided,
            }
            self.facts["model"] = digest_of(session.model.config)
            self.facts["scales"] = [] if fresh else scales_of(session.model)
            self.facts["active"] = active_in_peft(session.model)
        elif self.record is not None:
            self.facts["last_weights"] = _last_weights_of_reference(session)
            self.facts["held_as"] = _held_as(session)

    def keep(self, output_dir: Path, resumed: Path | None) -> None:
        """Write to the run's folder what its reference is, or compare what a run that goes on
        wrote.

        Args:
            resumed: the checkpoint that the run goes on from, in this folder or in that of the run
                before.

        Raises:
            CheckpointError: it goes on from another model, or beside another reference, than it
                began with.
        """
        if self.record is not None:
            self.record = self.session.ranks.writer_does(
                lambda: self._keep(output_dir, resumed), CheckpointError
            )

    def _keep(self, output_dir: Path, resumed: Path | None) -> Record | None:
        """What the run remembers."""
        file = None if resumed is None else resumed.parent.parent / KEPT
        if file is None or not file.exists():
            if resumed is not None:
                logger.warning(
                    "reference: there is no %s beside %s, so it is not compared with that of "
                    "before",
                    KEPT,
                    resumed,
                )
            _write_to(output_dir, {**self.facts, "reference": self.record})
            return self.record
        kept = json.loads(file.read_text())
        found: Record | None = kept.get("reference", self.record)
        if (
            self.record is not None
            and found is not None
            and (other := difference(found, self.record)) is not None
        ):
            raise CheckpointError(f"{file}: {other}")
        told = {"weights", "model", "scales", "active"}
        told |= {"places"} if kept.get("divided") == self.facts.get("divided") else set()
        told |= {"last_weights"} if kept.get("held_as") == self.facts.get("held_as") else set()
        if any(kept[name] != self.facts[name] for name in told & kept.keys() & self.facts.keys()):
            raise CheckpointError(
                f"{file}: the run's reference policy is the model that it began with, and this is "
                "another one; resume with the "
                "model that the run began with, and beside the same reference_model if one was "
                "named"
            )
        if file.parent != output_dir:
            _write_to(output_dir, kept)
        return found

    def beside(self, store: TokenStore) -> TokenStore:
        """The store with the column, or as it is where the objective stores none."""
        if not self.wanted:
            return store
        return store.with_column(
            REFERENCE, self._read(store) if (found := self._found(store)) is None else found
        )

    def _found(self, store: TokenStore) -> np.ndarray | None:
        """What the first rank finds in the cache, on all ranks."""
        ranks = self.session.ranks
        file = self._file(store)

        def read() -> list[float] | None:
            try:
                return load_file(file)[REFERENCE].tolist()
            except (OSError, SafetensorError, KeyError):
                return None

        values = ranks.writer_does(read, OSError)
        if values is None or len(values) != len(store):
            return None
        logger.info("reference: log-probabilities of %d documents read from %s", len(store), file)
        return np.asarray(values, np.float32)

    @torch.no_grad()
    def _read(self, store: TokenStore) -> np.ndarray:
        session = self.session
        ranks = self.session.ranks
        stream = self.stream(store.with_column(NUMBER, np.arange(len(store))))
        device = session.precision.device
        sums = torch.zeros(len(store) + 1, device=device)
        logger.info("reference: computing the log-probabilities of %d documents", len(store))
        with (
            session.presented.attending_documents(),
            in_evaluation(session.model),
            session.precision.autocast(),
        ):
            before = Moment(device)
            for batch in stream:
                with self.limited():
                    moved = batch.to(device, non_blocking=True)
                    score = partial(
                        _log_probabilities, session.presented, moved, session.objective.chunk_size
                    )
                    found = document_sums(session.presented.as_forward(score), moved)
                    number = moved.segments[NUMBER]
                    sums.index_copy_(0, torch.where(number < 0, len(store), number), found.float())
                    before.wait()
                before = Moment(device)
        with self.limited():
            values = ranks.sum(sums[:-1]).cpu().numpy()
        ranks.writer_does(lambda: self._write(store, values), OSError)
        return values

    def _write(self, store: TokenStore, values: np.ndarray) -> None:
        file = self._file(store)
        aside = file.with_suffix(f".{uuid.uuid4().hex[:8]}.aside")  # another run may write the same
        try:
            save_file({REFERENCE: values}, aside)
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)

    def _file(self, store: TokenStore) -> Path:
        """In the cache, beside the store's own."""
        model = json.dumps(self.facts, sort_keys=True)
        config = self.session.config
        digest = hashlib.sha256(
            f"{store.key} {model} {config.mixed_precision} {config.use_fp8}".encode()
        )
        for column in (store.id_starts, store.lengths):
            digest.update(np.ascontiguousarray(column).tobytes())
        return store.path.with_name(f"{digest.hexdigest()[:32]}.{REFERENCE}.safetensors")


def _write_to(output_dir: Path, kept: dict[str, Any]) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / KEPT).write_text(json.dumps(kept))


def _last_weights_of_reference(session: Session) -> str:
    """Of some weights of a reference that is asked in each step: a frozen model, or the base
    with adapters off.
    """
    frozen = session.objective.frozen.get(REFERENCE)
    named = (session.model if frozen is None else frozen.model).named_parameters()
    weights = [p for name, p in named if frozen is not None or "lora_" not in name]
    return fingerprint_over(weights[-LOOKED_AT:], session.ranks).values


def _held_as(session: Session) -> list[Any]:
    """What weights in memory depend on, beside the model."""
    config = session.config
    device = session.precision.device.type
    memory = sorted(config.memory or ())
    return [
        device,
        config.quantization,
        config.mixed_precision,
        config.use_fp8,
        config.use_fused_kernels,
        memory,
    ]


def _log_probabilities(presented: PresentedModel, batch: Batch, chunk_size: int) -> Tensor:
    return score_tokens(presented, batch, chunk_size).log_p


def scales_of(model: nn.Module) -> list[Any]:
    """By what each adapter's product is multiplied, ours and PEFT's, in the order of the layers."""
    ours = [layer.scale for _, layer in adapters(model)]
    of_peft = (getattr(module, "scaling", None) for module in model.modules())
    return [*ours, *(sorted(scaling.items()) for scaling in of_peft if isinstance(scaling, dict))]


def active_in_peft(model: nn.Module) -> list[Any]:
    """Which of PEFT's adapters take part in each layer, are switched off, or are merged; in the
    order of the layers.
    """
    layers: list[Any] = [
        module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)
    ]
    return [
        [list(layer.active_adapters), bool(layer.disable_adapters), list(layer.merged_adapters)]
        for layer in layers
    ]


def digest_of(config: Any) -> str:
    """Of all in a model's configuration that its log-probabilities depend on."""
    told = json.dumps(_that_counts(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _that_counts(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        str(name): _that_counts(inner)
        for name, inner in value.items()
        if name not in CHANGES_NOTHING
    }
