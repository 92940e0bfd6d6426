"""Default of ``sharding``: whether weights are divided, and among how many processes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh, on_each_machine
from chronicals.memory import card_memory, decoder_layers
from chronicals.policies.divided_weights import why_not_cut, why_not_divisible
from chronicals.policies.exclusions import EXCLUSIONS, GATHERED
from chronicals.policies.facts import WEIGHTS, Facts
from chronicals.policies.needed_memory import expected_memory


def choose_sharding(facts: Facts) -> str:
    """Return ``sharding`` as configured, else ``weights`` if whole weights do not fit on a GPU.

    They must be divisible for that. The model is as it was loaded; the run's adapters may be
    attached or not.
    """
    config = facts.config
    model = facts.model
    unasked = facts.ranks > 1 and "sharding" not in config.explicit
    if not unasked or not facts.total or not decoder_layers(model):
        return config.sharding
    trained = facts.trained
    comes_adapted = config.use_lora and not hasattr(model, "chronicals_lora")
    try:
        if comes_adapted:
            model.requires_grad_(False)
        fits = expected_memory(_as_planned(facts))[1].fits
        return config.sharding if fits or why_stays_whole(facts) else WEIGHTS
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def why_stays_whole(facts: Facts) -> str | None:
    """Return why weights are not divided by default; None if they can be."""
    config = facts.config
    beside = {"divided weights"}
    if facts.trains_layers:
        beside.add("divided trained weights")
    for row in EXCLUSIONS:
        asked = row.policy in config.explicit and getattr(config, row.policy)
        if asked and row.beside in beside and row.reason == GATHERED:
            return f"{row.policy}=True cannot be honoured where {GATHERED}"
    if config.sections.get("router", {}).get("anchor"):
        return "the anchor of routers replays tokens through whole weights"
    return why_not_divisible(facts) or why_not_cut(facts, ranks_per_copy(facts))


def ranks_per_copy(facts: Facts) -> int:
    """Return how many neighbouring ranks share one copy of the weights.

    As configured, else the ranks of one machine if that fits their GPUs, else all.

    Raises:
        ConfigurationError: ``sharding_ranks`` does not divide the number of processes.
    """
    ranks = facts.ranks
    asked = facts.config.sharding_ranks
    if asked is not None:
        if asked < 2 or ranks % asked:
            raise ConfigurationError(
                f"sharding_ranks={asked}: {ranks} processes cannot share weights {asked} by "
                f"{asked}; take a divisor of {ranks} from 2 on, or leave it out"
            )
        return asked
    here = facts.here
    if here is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not 1 < here < ranks or ranks % here:
        return ranks
    divided = facts.config.fitted(sharding=WEIGHTS, sharding_ranks=here)
    fits = expected_memory(_as_planned(replace(facts, config=divided)))[1].fits
    return here if fits else ranks


def _as_planned(facts: Facts) -> Facts:
    """Return the facts of this run before its model is loaded, assuming fused layers."""
    return Facts(
        config=facts.config,
        model=facts.model,
        ranks=facts.ranks,
        context=facts.config.context_parallel,
        here=facts.here,
        total=facts.total,
    )


def with_sharding(config: ChronicalsConfig, model: Any, ranks: Mesh) -> ChronicalsConfig:
    """Return the configuration with the ``sharding`` that fits the GPUs; all ranks must call it."""
    if ranks.count == 1 or "sharding" in config.explicit:
        return config
    total = smallest_card(ranks)
    if not total:
        return config
    here = on_each_machine(ranks)
    chosen = choose_sharding(Facts(config, model, ranks.count, here=here, total=total))
    return config if chosen == config.sharding else config.fitted(sharding=chosen)


def smallest_card(ranks: Mesh) -> int:
    """Return the bytes of the smallest GPU of all ranks, 0 without GPUs; all ranks must call it."""
    device = ranks.device
    if device.type != "cuda":
        return 0
    return min(ranks.gather_values(card_memory(device)))
