"""Frozen models that an objective needs besides the trained one, such as a teacher.

They are called in the steps of a run, or compute columns of the data before it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, TokenStore, filler_token
from chronicals.distributed import Mesh
from chronicals.models import (
    PresentedModel,
    check_positions,
    embedding_table,
    input_device,
)
from chronicals.objectives import Objective
from chronicals.objectives.terms import Columns
from chronicals.patching import fuse_weights, patch_parts
from chronicals.policies.facts import why_not_fused
from chronicals.training.columns.stored_columns import ColumnSource, StoredColumns
from chronicals.training.presented import present_for

logger = logging.getLogger(__name__)


def bring_frozen(
    objective: Objective, model: Any, tokenizer: Any, config: ChronicalsConfig
) -> None:
    """Load the objective's frozen models into ``objective.frozen``, ready to be called.

    Call it before ``model``, on its device, is changed in any way.

    Raises:
        ConfigurationError: a model cannot be loaded or does not fit; the message names the setting.
    """
    objective.frozen.clear()
    present_frozen(objective, objective.bring(model, tokenizer, config), model, config)


def present_frozen(
    objective: Objective, models: Mapping[str, Any], model: Any, config: ChronicalsConfig
) -> None:
    """Freeze models and put them into ``objective.frozen``.

    They get the device of ``model`` and its kernels.

    Their own adapters stay as they are.
    """
    device = input_device(model)
    for name, frozen in models.items():
        frozen.requires_grad_(False).eval().to(device)
        frozen.config.use_cache = False
        presented = present_for(objective, frozen, config)
        if config.use_fused_kernels and device.type == "cuda":
            patch_parts(presented.model, whole_layers=why_not_fused(config, presented) is None)
            fuse_weights(frozen)
        objective.frozen[name] = presented
        size = sum(parameter.nbytes for parameter in frozen.parameters()) / 2**30
        logger.info("%s: %s, frozen, %.2f GiB on %s", name, type(frozen).__name__, size, device)


@contextmanager
def frozen_attending(objective: Objective) -> Iterator[None]:
    """Return a context in which the frozen models may be called and attend within documents."""
    with ExitStack() as contexts:
        for presented in objective.frozen.values():
            contexts.enter_context(presented.attending_documents())
        yield


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

    source = ColumnSource(batches, computing, input_device(model), config.seed, ranks)
    for declared in declarations:
        cached = StoredColumns(declared, source, json.dumps(declared.identity))
        try:
            stores = [cached.beside(store) for store in stores]
        finally:
            objective.frozen.pop(declared.name, None)
    return stores
