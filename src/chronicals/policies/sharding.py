"""Sharding of the optimizer states, or of the weights too, among processes.

``with_sharding`` chooses the default: whether weights are divided, and among how many processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import (
    Mesh,
    divide_again,
    on_each_machine,
    stay_gathered,
    whole_parts,
)
from chronicals.memory import card_memory, decoder_layers
from chronicals.objectives import build_objective
from chronicals.policies.divided_weights import (
    check_divisible,
    divide_weights,
    load_of_shares,
    why_not_cut,
    why_not_divisible,
    with_gathered_weights,
)
from chronicals.policies.exclusions import EXCLUSIONS, GATHERED
from chronicals.policies.facts import DIVIDE_WEIGHTS, Facts, fillable, trains_layers
from chronicals.policies.frozen_models import planned_frozen
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.policy import Course, Decision, MemoryLoad, Policy, Remedy, register_policy
from chronicals.policies.step_time import StepWork


class Sharding(Policy):
    """``sharding: optimizer`` or ``weights``; if unset, ``with_sharding`` chooses."""

    name = "sharding"
    title = "sharding"
    shares = True

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return whether the optimizer states or the weights may be divided."""
        return config.sharding != "none"

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Return the decision that the solver made first (``chosen``)."""
        return course.sharding

    def chosen(self, facts: Facts) -> Decision:
        """Decide what is divided, and among how many processes.

        Raises:
            ConfigurationError: weights cannot be divided as they are asked to be.
        """
        config = facts.config
        if facts.ranks == 1:
            return Decision(self.name, False, "one process")
        if (
            config.sharding_ranks
            and config.sharding != DIVIDE_WEIGHTS
            and self.name in config.explicit
        ):
            raise ConfigurationError(
                f"sharding_ranks={config.sharding_ranks}: no weights are divided with "
                f"sharding={config.sharding!r}; set sharding='weights' too, or leave it out"
            )
        if config.sharding == "none":
            words = "as asked, every process has all optimizer states"
            return Decision(self.name, False, words, matters=True)
        if config.sharding == DIVIDE_WEIGHTS:
            among = ranks_per_copy(facts)
            check_divisible(facts, among)
            words = "frozen weights"
            if trains_layers(facts.model):
                words = "weights, gradients' sums and optimizer states"
            words += f", a share of 1/{among} in each process"
            if among < facts.ranks:
                words += f", {facts.ranks // among} copies"
            if facts.here is not None and facts.here < among:
                words += f", each over {-(-among // facts.here)} machines"
                if not config.sharding_ranks:
                    words += ", for the cards of one hold no copy"
            return Decision(self.name, True, words, DIVIDE_WEIGHTS, among=among)
        words = f"gradients' sums and optimizer states, a share of 1/{facts.ranks} in each process"
        if config.sharding_ranks:
            words += f"; sharding_ranks={config.sharding_ranks} is of weights that are divided"
        return Decision(self.name, True, words)

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with a share of the states, its own values and its summed gradients."""
        if facts.ranks == 1:
            return load
        if facts.divides_weights:
            return load_of_shares(facts, ranks_per_copy(facts), load)
        return replace(load, states=(load.states + load.weight + 4) / facts.ranks)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the update of a share, and the weights that are gathered for it."""
        if decision.how != DIVIDE_WEIGHTS:
            return replace(work, updated=work.updated / facts.ranks)
        work = replace(work, updated=work.updated / decision.among)
        return with_gathered_weights(facts, work, decision)

    def divide(self, model: Any, facts: Facts, decision: Decision, ranks: Mesh) -> None:
        """Divide the weights, or make whole weights the same in every process.

        The recipe calls it directly, since all ranks must meet here.

        Raises:
            ConfigurationError: weights that an earlier run divided would not be in this run.
        """
        if decision.how != DIVIDE_WEIGHTS:
            if len(list(whole_parts(model.parameters()))) < len(list(model.parameters())):
                raise ConfigurationError(
                    f"sharding={facts.config.sharding!r}: a run before divided the weights of "
                    "this model among the processes; set sharding='weights', or load the model "
                    "again"
                )
            ranks.same_weights(model.parameters())
            return
        divide_weights(model, facts.config, ranks, decision.among)
        if trains_layers(model):
            divide_again(model)  # the caller may have run a pass that left layers gathered
            stay_gathered(decoder_layers(model), decision.stay)

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield divided weights, if several processes have whole ones."""
        if ranks > 1 and config.sharding != DIVIDE_WEIGHTS:
            yield Remedy({"sharding": DIVIDE_WEIGHTS})


SHARDING = register_policy(Sharding())


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
        return config.sharding if fits or why_stays_whole(facts) else DIVIDE_WEIGHTS
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def why_stays_whole(facts: Facts) -> str | None:
    """Return why weights are not divided by default; None if they can be."""
    config = facts.config
    beside = {"divided weights"}
    if trains_layers(facts.model):
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
    # Neighbours on one machine gather over its own links, where its cards hold a copy.
    divided = facts.config.fitted(sharding=DIVIDE_WEIGHTS, sharding_ranks=here)
    fits = expected_memory(_as_planned(replace(facts, config=divided)))[1].fits
    return here if fits else ranks


def _as_planned(facts: Facts) -> Facts:
    """Return the facts of this run before its models are loaded, assuming fused layers."""
    return Facts(
        config=facts.config,
        model=facts.model,
        ranks=facts.ranks,
        context=facts.config.context_parallel,
        here=facts.here,
        total=facts.total,
        frozen_models=facts.frozen_models,
    )


def with_sharding(config: ChronicalsConfig, model: Any, ranks: Mesh) -> ChronicalsConfig:
    """Return the configuration with the ``sharding`` that fits the GPUs; all ranks must call it."""
    if ranks.count == 1 or "sharding" in config.explicit:
        return config
    total = fillable(smallest_card(ranks), config)
    if not total:
        return config
    here = on_each_machine(ranks)
    frozen = planned_frozen(build_objective(config), config)
    facts = Facts(config, model, ranks.count, here=here, total=total, frozen_models=frozen)
    chosen = choose_sharding(facts)
    return config if chosen == config.sharding else config.fitted(sharding=chosen)


def smallest_card(ranks: Mesh) -> int:
    """Return the bytes of the smallest GPU of all ranks, 0 without GPUs; all ranks must call it."""
    device = ranks.device
    if device.type != "cuda":
        return 0
    return min(ranks.gather_values(card_memory(device)))
