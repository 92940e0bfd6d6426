"""Sharding of the optimizer states, or of the weights too, among processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh, divide_again, stay_gathered
from chronicals.memory import Estimate, decoder_layers
from chronicals.policies.divided_weights import (
    check_divisible,
    check_whole,
    divide_weights,
    load_of_shares,
)
from chronicals.policies.facts import WEIGHTS, Facts, trains_layers
from chronicals.policies.policy import Course, Decision, Load, Policy, Remedy, register
from chronicals.policies.weight_copies import ranks_per_copy, why_stays_whole


class Sharding(Policy):
    """``sharding: optimizer`` or ``weights``; if unset, ``weight_copies.with_sharding`` chooses."""

    name = "sharding"
    title = "sharding"
    shares = True

    def asked(self, config: ChronicalsConfig) -> bool:
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
        if config.sharding_ranks and config.sharding != WEIGHTS and self.name in config.explicit:
            raise ConfigurationError(
                f"sharding_ranks={config.sharding_ranks}: no weights are divided with "
                f"sharding={config.sharding!r}; set sharding='weights' too, or leave it out"
            )
        if config.sharding == "none":
            words = "as asked, every process has all optimizer states"
            return Decision(self.name, False, words, matters=True)
        if config.sharding == WEIGHTS:
            return self._of_weights(facts)
        words = f"gradients' sums and optimizer states, a share of 1/{facts.ranks} in each process"
        if config.sharding_ranks:
            words += f"; sharding_ranks={config.sharding_ranks} is of weights that are divided"
        return Decision(self.name, True, words)

    def _of_weights(self, facts: Facts) -> Decision:
        among = ranks_per_copy(facts)
        check_divisible(facts, among)
        words = "frozen weights"
        if facts.trains_layers:
            words = "weights, gradients' sums and optimizer states"
        words += f", a share of 1/{among} in each process"
        if among < facts.ranks:
            words += f", {facts.ranks // among} copies"
        if facts.here is not None and facts.here < among:
            words += f", each over {-(-among // facts.here)} machines"
            if not facts.config.sharding_ranks:
                words += ", for the cards of one hold no copy"
        return Decision(self.name, True, words, WEIGHTS, among=among)

    def kept_whole(self, facts: Facts, decision: Decision, memory: Estimate) -> Decision:
        """Return ``decision`` with the reason why weights that do not fit are not divided."""
        asked = self.name in facts.config.explicit
        if not decision.runs or decision.how == WEIGHTS or asked or memory.fits:
            return decision
        reason = why_stays_whole(facts)
        if reason is None:
            return decision
        words = f"; weights are not divided though they do not fit a card whole: {reason}"
        return replace(decision, reason=decision.reason + words)

    def bytes(self, facts: Facts, load: Load) -> Load:
        """Return ``load`` with a share of the states, the share's own values and its summed
        gradients.
        """
        if facts.ranks == 1:
            return load
        if facts.divides_weights:
            return load_of_shares(facts, ranks_per_copy(facts), load)
        return replace(load, states=(load.states + load.weight + 4) / facts.ranks)

    def divide(self, model: Any, facts: Facts, decision: Decision, ranks: Mesh) -> None:
        """Divide the weights, or make whole weights the same in every process.

        The recipe calls it directly, since all ranks must meet here.
        """
        if decision.how != WEIGHTS:
            check_whole(model, facts.config)
            ranks.same_weights(model.parameters())
            return
        divide_weights(model, facts.config, ranks, decision.among)
        if trains_layers(model):
            divide_again(model)  # the caller may have run a pass that left layers gathered
            stay_gathered(decoder_layers(model), decision.stay)

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        if ranks > 1 and config.sharding != WEIGHTS:
            yield Remedy({"sharding": WEIGHTS})


SHARDING = register(Sharding())
