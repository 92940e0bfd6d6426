"""Loading of the model to train: whole in every process, or divided among ranks on reading."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.distributed import (
    Mesh,
    RowsRead,
    on_each_machine,
    prove_alike,
    put_whole,
    shard_frozen,
)
from chronicals.formats.gguf.reader import gguf_of
from chronicals.memory import decoder_layers
from chronicals.models import quantise_layers
from chronicals.models.loading import (
    WEIGHT_DTYPES,
    is_packed,
    load_for_rows,
    load_replacing,
    load_without_weights,
)
from chronicals.models.rows import NotByRows, digest_of_files
from chronicals.objectives import OBJECTIVES, Objective, build_objective
from chronicals.policies import Facts
from chronicals.policies.divided_weights import check_divisible
from chronicals.policies.expert_offload import load_experts_as_asked
from chronicals.policies.facts import DIVIDE_WEIGHTS, PRODUCT_TYPES, fillable
from chronicals.policies.frozen_models import planned_frozen
from chronicals.policies.sharding import choose_sharding, ranks_per_copy, smallest_card
from chronicals.saving import SavedModel
from chronicals.training.adapters import lora_config_of, watcher
from chronicals.training.preparation import fit_precision

logger = logging.getLogger(__name__)

LOADED_FROM = "_chronicals_loaded_from"
"""Attribute of a model that is unchanged since it was loaded: its ``SavedModel``."""


def load_to_train(
    saved: SavedModel, config: ChronicalsConfig, ranks: Mesh, trust_remote_code: bool = False
) -> tuple[Any, ChronicalsConfig]:
    """Return the model, and the configuration with a ``sharding`` that fits memory if none is set.

    If weights are divided, no process ever holds all of them: each reads its rows, or quantises one
    weight after the other and keeps its rows. A frozen base is loaded whole and divided later if it
    has adapters already, if its files are packed, or if the starting values of adapters are
    computed from its weights.

    Raises:
        ValueError: the model cannot be loaded, with the reason.
        ConfigurationError: the ranks read their rows from files that differ.
    """
    card = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = fit_precision(config, card)
    kind = OBJECTIVES[config.objective]
    place = saved.place
    loads_as_usual = kind.load.__func__ is Objective.load.__func__  # type: ignore[attr-defined]
    plain = not saved.adapted and gguf_of(place) is None and loads_as_usual
    by_rows = (
        ranks.count > 1
        and plain
        # Some starting values of adapters are computed from the base's whole weights.
        and not (
            config.use_lora
            and (watcher(config) is not None or lora_config_of(config).takes_from_weights)
        )
        and not is_packed(saved.config(trust_remote_code))
    )
    if by_rows:
        config = _with_sharding(place, config, ranks, trust_remote_code)
    model = (
        _divided(place, config, ranks, trust_remote_code)
        if by_rows and config.sharding == DIVIDE_WEIGHTS
        else None
    )
    if model is None and plain:
        model = load_experts_as_asked(place, config, ranks, trust_remote_code)
    if model is None:
        given = (
            WEIGHT_DTYPES[config.mixed_precision],
            trust_remote_code,
            config.quantization,
            watcher(config),
        )
        model = kind.load(saved, *given)
    setattr(model, LOADED_FROM, saved)
    return model, config


def _with_sharding(
    place: Path | str, config: ChronicalsConfig, ranks: Mesh, trust_remote_code: bool
) -> ChronicalsConfig:
    """Return the configuration with sharding fields chosen by memory, from the model's shapes."""
    if "sharding" in config.explicit and config.sharding != DIVIDE_WEIGHTS:
        return config
    model = load_without_weights(place, trust_remote_code)
    if config.quantization is not None:
        quantise_layers(model)
    total = fillable(smallest_card(ranks), config)
    here = on_each_machine(ranks)
    frozen = planned_frozen(build_objective(config), config)
    facts = Facts(config, model, ranks.count, here=here, total=total, frozen_models=frozen)
    if choose_sharding(facts) != DIVIDE_WEIGHTS:
        return config
    if ranks.writer and "sharding" not in config.explicit:
        logger.info(
            "sharding: weights, for they do not fit a card of %.0f GiB whole beside the rest",
            total / 2**30,
        )
    model.requires_grad_(not config.use_lora)
    sharing = ranks_per_copy(facts)
    check_divisible(facts, sharing)
    return config.fitted(sharding=DIVIDE_WEIGHTS, sharding_ranks=sharing)


def _divided(
    place: Path | str, config: ChronicalsConfig, ranks: Mesh, trust_remote_code: bool
) -> Any | None:
    """Return the model of which no process reads all weights.

    With trained weights the model has none yet and reads its rows when it is sharded; frozen linear
    layers are divided here. None, with a warning, if the layout of the files does not permit it.

    Raises:
        NotByRows: the layout does not permit it, and ``sharding`` was set.
    """
    dtype = WEIGHT_DTYPES[config.mixed_precision]
    sharing = config.sharding_ranks or ranks.count
    device = ranks.device
    kept = PRODUCT_TYPES[config.mixed_precision]
    otherwise = None
    try:
        if config.use_lora:
            take = partial(RowsRead.read, ranks, sharing, device, kept, config.quantization)
            model = load_replacing(place, dtype, take, trust_remote_code)
        else:
            model = load_for_rows(place, dtype, trust_remote_code)
    except NotByRows as error:
        otherwise = error
    # Each rank keeps rows that no other rank sees, so all must read the same files.
    prove_alike(ranks, {"the content of the model's files": digest_of_files(place)})
    if otherwise is not None:
        if "sharding" in config.explicit:
            raise otherwise
        if ranks.writer:
            logger.warning(
                "sharding: every process loads the whole model, before it is divided (%s)",
                otherwise,
            )
        return None
    if not config.use_lora:
        return model
    model.requires_grad_(False)
    layers = decoder_layers(model)
    put_whole(layers, device)
    shard_frozen(layers, ranks, sharing, device, kept)
    return model
