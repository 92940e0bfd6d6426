"""Decision on all policies of a run: one solver for the trainer and for plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from chronicals.memory import LAYERS, NOTHING, OTHERS, Estimate, Moment, recomputes
from chronicals.policies.cuda_graphs import CUDA_GRAPHS
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.facts import DIVIDE_WEIGHTS, Facts, trains_layers
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import (
    asked_for,
    expected_memory,
    gathered_bytes,
    layers_that_stay,
    refuse_what_cannot_fit,
)
from chronicals.policies.policy import POLICIES, Course, Decision, Fitted, policies
from chronicals.policies.recompute_layers import RECOMPUTE_LAYERS, asked_recomputation
from chronicals.policies.sharding import SHARDING, why_stays_whole
from chronicals.policies.step_time import AS_LONG_AS_PACKS, Documents, StepWork

logger = logging.getLogger(__name__)


def decide(facts: Facts, smallest: Callable[[int], int] = int) -> dict[str, Decision]:
    """Decide for every policy whether it runs, by its name in the order of the log.

    Sharding comes first, for all else depends on what a process has; then the policies that do not
    depend on the memory; then recomputation, as much as is left to be saved; then the others.

    Args:
        facts: of the run.
        smallest: takes a number that every process has, and returns the smallest; called once, by
            all.

    Raises:
        ConfigurationError: a policy that was asked for cannot run, or the run does not fit its
            card.
    """
    facts, sharding = settle_sharding(facts)
    frees, memory = expected_memory(facts)
    whole = sharding.runs and sharding.how != DIVIDE_WEIGHTS
    if whole and SHARDING.name not in facts.config.explicit and not memory.fits:
        reason = why_stays_whole(facts)
        if reason is not None:
            words = f"; weights are not divided though they do not fit a card whole: {reason}"
            sharding = replace(sharding, reason=sharding.reason + words)
    standing = asked_for(facts, frees) | conditions(facts)
    course = Course(frozenset(standing), memory, frees, sharding)
    decisions: dict[str, Decision] = {}
    for policy in policies():
        if policy.before_memory:
            course = _decided(policy.name, facts, course, decisions)
    fitted = fit_to_memory(facts, sharding, memory, smallest)
    # what every layer recomputes regardless of memory; None if the memory decides
    fixed = asked_recomputation(facts.config)
    if fixed is None and recomputes(facts.model):
        fixed = LAYERS
    elif fixed is None and not getattr(facts.model, "supports_gradient_checkpointing", False):
        fixed = NOTHING
    refuse_what_cannot_fit(
        facts.config,
        fitted.memory,
        fixed,
        lambda length: expected_memory(
            replace(facts, config=facts.config.fitted(max_seq_length=length))
        )[1],
        facts.ranks,
    )
    logger.debug("memory by part, at %s: %s", fitted.peak.name, fitted.peak.words())
    course = replace(course, sharding=fitted.sharding, recomputed=fitted.recomputed, fitted=fitted)
    for policy in policies():
        if not policy.before_memory:
            course = _decided(policy.name, facts, course, decisions)
    return {policy.name: decisions[policy.name] for policy in policies()}


def settle_sharding(facts: Facts) -> tuple[Facts, Decision]:
    """Return the decision on sharding, and facts with the number of ranks that share a copy.

    Raises:
        ConfigurationError: weights cannot be divided as they are asked to be.
    """
    sharding = SHARDING.chosen(facts)
    if facts.divides_weights:
        facts = replace(facts, config=facts.config.fitted(sharding_ranks=sharding.among))
    return facts, sharding


def _decided(name: str, facts: Facts, course: Course, decisions: dict[str, Decision]) -> Course:
    """Add the decision of a policy, and return the course in which it stands or does not."""
    decisions[name] = POLICIES[name].decide(facts, course)
    standing = course.standing - {name}
    if decisions[name].runs:
        standing = standing | {name}
    return replace(course, standing=standing)


def planned_peak(facts: Facts, decisions: Mapping[str, Decision]) -> Moment:
    """Return the largest moment of a run's steps, as expected under what was decided.

    Args:
        facts: of the run.
        decisions: result of ``decide``.
    """
    facts, _ = settle_sharding(facts)
    sharding = decisions[SHARDING.name]
    _, memory = expected_memory(facts)
    if sharding.stay:
        memory = memory.beside(OTHERS, sharding.stay * gathered_bytes(facts))
    return Fitted(memory, decisions[RECOMPUTE_LAYERS.name], sharding).peak


def fit_to_memory(
    facts: Facts, sharding: Decision, memory: Estimate, smallest: Callable[[int], int] = int
) -> Fitted:
    """Recompute as much as the memory needs, and let layers stay gathered in what is spare.

    Args:
        facts: of the run.
        sharding: the decision on sharding.
        memory: expected of the run.
        smallest: as for ``decide``.

    Raises:
        ConfigurationError: what is asked for cannot be recomputed.
    """
    recomputed = RECOMPUTE_LAYERS.chosen(facts, memory)
    if not facts.divides_weights or not trains_layers(facts.model):
        smallest(0)
        return Fitted(memory, recomputed, sharding)
    size = gathered_bytes(facts)
    stay = smallest(layers_that_stay(memory, recomputed.how, recomputed.layers, size))
    if stay:
        memory = memory.beside(OTHERS, stay * size)
        recomputed = RECOMPUTE_LAYERS.chosen(facts, memory)  # unchanged, since these bytes fit
        words = (
            f"; the last {stay} layers stay gathered between their passes, "
            f"{stay * size / 2**30:.1f} GiB"
        )
        sharding = replace(sharding, reason=sharding.reason + words, stay=stay)
    return Fitted(memory, recomputed, sharding)


def work_of(
    facts: Facts,
    frees: bool,
    fitted: Fitted,
    sizes: ModelSizes,
    documents: Documents = AS_LONG_AS_PACKS,
) -> StepWork:
    """Return the work of a step with all policies that run.

    Args:
        facts: of the run.
        frees: True if gradients are summed and freed in the backward pass.
        fitted: its memory, with the recomputation that it needs.
        sizes: of its model.
        documents: of its data.
    """
    made = {RECOMPUTE_LAYERS.name: fitted.recomputed, SHARDING.name: fitted.sharding}
    if CUDA_GRAPHS.has_no_room(facts, fitted):
        made[CUDA_GRAPHS.name] = Decision(CUDA_GRAPHS.name, False, "")
    standing = asked_for(facts, frees) | conditions(facts)
    work = StepWork.of(facts, fitted.memory, sizes, documents)
    for policy in policies():
        if policy.name not in standing:
            continue
        decision = made.get(policy.name, Decision(policy.name, True, ""))
        if decision.runs and why_excluded(policy.name, standing, facts) is None:
            work = policy.work(facts, work, decision)
        else:
            standing.discard(policy.name)
    return work


def summary(decisions: Iterable[Decision]) -> list[str]:
    """Return lines for the log: what runs, and what does not though it matters."""
    running = []
    missing = []
    for decision in decisions:
        title = POLICIES[decision.field].title
        if decision.runs and title:
            running.append(f"{title} ({decision.reason})")
        elif decision.matters:
            missing.append(f"without {title}: {decision.reason}")
    return [f"in use: {', '.join(running)}"] * bool(running) + missing
