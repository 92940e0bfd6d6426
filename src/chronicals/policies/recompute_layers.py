"""Recomputation of activations in the backward pass: whole layers, or norms and gated units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.memory_entries import WHOLE_LAYERS
from chronicals.memory import (
    CHEAP,
    LAYERS,
    NOTHING,
    Estimate,
    decoder_layers,
    disable_gradient_checkpointing,
    enable_gradient_checkpointing,
    enters_again,
    recomputes,
)
from chronicals.patching import recompute_norms_and_units
from chronicals.policies.facts import Facts
from chronicals.policies.needed_memory import agreeing_switches, leanest_memory
from chronicals.policies.policy import (
    Course,
    Decision,
    Policy,
    Remedy,
    Running,
    Stage,
    register_policy,
)
from chronicals.policies.step_time import OTHER_KERNELS, SKIPPED, StepWork

CHECKPOINTED = "_chronicals_checkpointed"
"""Attribute of a decoder whose layers an earlier run recomputed; this run may not need it."""


class RecomputeLayers(Policy):
    """Recomputation as configured, else as much as the memory requires."""

    name = "use_gradient_checkpointing"
    title = "activation recomputation"
    setting = "memory=['recompute_elementwise']"
    only_time = True
    stage = Stage.LAYERS

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return whether layers or units are recomputed, or may be if memory needs it."""
        return asked_recomputation(config) != NOTHING

    def why_not(self, facts: Facts) -> str | None:
        """Return why norms and gated units cannot be recomputed; None if they can."""
        if facts.unfused is None:
            return None
        return f"needs fused decoder layers, and none run ({facts.unfused}); take recompute_layers"

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Return the decision that the solver made while it fitted the memory (``chosen``)."""
        assert course.recomputed is not None
        return course.recomputed

    def chosen(self, facts: Facts, memory: Estimate) -> Decision:
        """Decide what is recomputed so that ``memory`` fits.

        Raises:
            ConfigurationError: what is asked for cannot be recomputed.
        """
        config = facts.config
        asked = asked_recomputation(config)
        who = facts.who_asked(self.name)
        if asked == LAYERS:
            return Decision(self.name, True, f"{who}, {LAYERS} recomputed", layers=None)
        if asked == CHEAP:
            reason = self.why_not(facts)
            if reason:
                raise ConfigurationError(f"{self.setting}: {reason}")
            return Decision(self.name, True, f"{who}, {CHEAP} recomputed", CHEAP)
        if asked == NOTHING:
            return Decision(
                self.name, False, "turned off" if config.card_decides else "not among memory"
            )
        model = facts.model
        if recomputes(model):
            if facts.records_routers and enters_again(model):
                raise ConfigurationError(
                    "the model recomputes its layers with use_reentrant=True, through which its "
                    "router loss has no gradient; leave that to us "
                    "(model.gradient_checkpointing_disable()), or pass use_reentrant=False"
                )
            return Decision(self.name, True, "the model's own, which stays as it is")
        # As much as the memory requires.
        cheap, layers = memory.choice()
        words = memory.words()
        name = type(model).__name__
        if layers and not getattr(model, "supports_gradient_checkpointing", False):
            reason = f"{words}: {name} cannot recompute its layers"
            return Decision(self.name, False, reason, matters=True)
        if layers and not decoder_layers(model):
            reason = f"{words}: all are, this class has no list of layers"
            return Decision(self.name, True, reason, layers=None)
        return Decision(self.name, bool(layers) or cheap != NOTHING, words, cheap, layers)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with what is computed again.

        Whole layers are, without the last product, whose output their backward pass does not read
        (``memory.recompute``); and norms and gated units of the others, if all recompute them.
        """
        memory = work.memory
        shape = work.job.shape
        layers = decision.layers
        if layers is None or is_of_the_model(decision):
            layers = memory.layers
        again = layers / max(memory.layers, 1)
        others = memory.layers - layers
        kept = memory.kept.get(decision.how, memory.kept[NOTHING])
        forward = work.forward
        backward = work.backward
        moved = backward.moved + again * forward.moved
        if decision.how == CHEAP:
            # two norms that read and write D values, and units of three F
            units = 3 * shape.inner * shape.each
            moved += work.job.tokens * others * 2 * (4 * shape.width + units)
        products = list(backward.products)
        for each in forward.products:
            # experts are computed again whole: OLMoE has both of their products twice (profile in
            # benchmarks/results/row-olmoe-1b-7b-full-fixed-h100.json)
            if again and (each.product.name != SKIPPED or shape.routed):
                products.append(replace(each, times=again * each.times))
        kernels = again * shape.layers * (len(forward.products) + OTHER_KERNELS / 3)
        return replace(
            work,
            backward=replace(
                backward,
                products=tuple(products),
                scores=backward.scores + again * forward.scores,
                moved=moved,
            ),
            kept=layers * memory.kept[LAYERS] + others * kept,
            kernels=work.kernels + kernels,
            again=again,
        )

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Recompute the first layers whole, or norms and gated units of all."""
        if decision.layers != 0:
            enable_gradient_checkpointing(model, facts.unfused is None, decision.layers)
            setattr(model.get_decoder(), CHECKPOINTED, True)
        if decision.how == CHEAP:
            recompute_norms_and_units(model)

    def spares(self, config: ChronicalsConfig, ranks: int) -> bool:
        """Return True: it always belongs to the leanest ``memory``."""
        return True

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield the leanest ``memory``, which has what others save at the cost of time only."""
        leanest = leanest_memory(config, ranks)
        if config.memory_policies != leanest:
            yield Remedy({"memory": sorted(leanest), **agreeing_switches(config)})

    def addition(self, running: Running) -> Decision | None:
        """Return all layers, if the memory decides and some are left that are not computed again."""
        decision = running.decisions[self.name]
        model = running.model
        is_left = decision.layers is not None and not is_of_the_model(decision)
        can = is_left and getattr(model, "supports_gradient_checkpointing", False)
        if asked_recomputation(running.facts.config) is not None or not can:
            return None
        if not decoder_layers(model):
            return None
        return replace(decision, runs=True, reason="all layers are recomputed", layers=None)

    def join(self, running: Running, decision: Decision) -> None:
        """Recompute all layers."""
        enable_gradient_checkpointing(running.model, running.facts.unfused is None)
        setattr(running.model.get_decoder(), CHECKPOINTED, True)


RECOMPUTE_LAYERS = register_policy(RecomputeLayers())


def stop_other_recomputation(model: Any, decision: Decision) -> None:
    """Switch off the model's own recomputation, unless the decision relies on it."""
    if recomputes(model) and not is_of_the_model(decision):
        disable_gradient_checkpointing(model)


def is_of_the_model(decision: Decision) -> bool:
    """Return whether the model recomputes its layers by itself, and the run leaves it so."""
    return decision.runs and decision.layers == 0 and decision.how != CHEAP


def asked_recomputation(config: ChronicalsConfig) -> str | None:
    """Return what every layer recomputes by the configuration; None if the memory decides."""
    if not config.memory_policies.isdisjoint(WHOLE_LAYERS):
        return LAYERS
    if "recompute_elementwise" in config.memory_policies:
        return CHEAP
    if not config.card_decides or not config.use_gradient_checkpointing:
        return NOTHING
    return None
