"""Plan of a run whose memory was too small: smaller micro-batches, and what remedies save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.memory import LAYERS
from chronicals.policies.facts import Facts
from chronicals.policies.needed_memory import FILLED, GIB
from chronicals.policies.policy import POLICIES, Decision
from chronicals.policies.recompute_layers import RECOMPUTE_LAYERS, asked_recomputation
from chronicals.policies.solver import planned_peak

MAKE_ANOTHER_MODEL = {"use_lora", "quantization"}
"""Fields of remedies that train another model, whose bytes are not those of the one that is here."""


def in_smaller_batches(
    facts: Facts, decisions: Mapping[str, Decision], needed: int
) -> ChronicalsConfig | None:
    """Return the configuration with the largest smaller batch that is expected to fit.

    ``batch_size`` times ``gradient_accumulation_steps`` stays, and so do the documents of each
    step. The smallest batch is taken where none is expected to fit, and half of the batch where no
    card limits the memory.

    Args:
        facts: of the run.
        decisions: decision on each policy, which stays.
        needed: bytes that a step was measured to need at least; 0 where nothing was measured. What
            is expected grows by as much as that exceeds what was expected.

    Returns:
        The configuration; None if no smaller batch is possible.
    """
    config = facts.config
    packs = config.batch_size * config.gradient_accumulation_steps
    running = [POLICIES[name] for name, decision in decisions.items() if decision.runs]
    possible = []
    for size in range(config.batch_size - 1, 0, -1):
        if packs % size:
            continue
        smaller = config.fitted(batch_size=size, gradient_accumulation_steps=packs // size)
        changed = replace(facts, config=smaller)
        if all(policy.why_not(changed) is None for policy in running):
            possible.append(smaller)
    excess = 1.0
    if facts.total:
        excess = max(excess, needed / planned_peak(facts, decisions).held)
    for smaller in possible:
        if facts.total:
            expected = excess * planned_peak(replace(facts, config=smaller), decisions).held
            fits = expected <= FILLED * facts.total
        else:
            fits = 2 * smaller.batch_size <= config.batch_size
        if fits:
            return smaller
    return possible[-1] if possible else None


def saved_in_words(
    facts: Facts, decisions: Mapping[str, Decision], fields: Mapping[str, Any]
) -> str | None:
    """Return in words what the fields of a remedy save; None if that is nothing.

    Args:
        facts: of the run that does not fit.
        decisions: decision on each policy in it; what is recomputed stays, unless ``fields`` say.
        fields: values of the configuration.
    """
    unknown = "as much as chronicals plan says"
    if not MAKE_ANOTHER_MODEL.isdisjoint(fields):
        return unknown
    changed = replace(facts, config=facts.config.replace(**fields))
    recomputed = decisions[RECOMPUTE_LAYERS.name]
    if asked_recomputation(changed.config) == LAYERS:
        recomputed = replace(recomputed, layers=None)
    try:
        then = planned_peak(changed, {**decisions, RECOMPUTE_LAYERS.name: recomputed}).held
    except ConfigurationError:
        return unknown
    saved = planned_peak(facts, decisions).held - then
    if saved <= 0:
        return None
    words = f"{saved / GIB:.2f} GiB" if saved >= GIB / 100 else f"{saved / 2**20:.2f} MiB"
    return f"saves about {words}"
