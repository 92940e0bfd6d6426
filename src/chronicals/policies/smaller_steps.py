"""Plan of a run whose memory turned out to be too small: smaller micro-batches of the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chronicals.config import ChronicalsConfig
from chronicals.policies.facts import Facts
from chronicals.policies.needed_memory import FILLED, held_bytes
from chronicals.policies.policy import POLICIES, Decision


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
    possible = []
    for size in range(config.batch_size - 1, 0, -1):
        smaller = config.fitted(batch_size=size, gradient_accumulation_steps=packs // size)
        if packs % size == 0 and _policies_run(replace(facts, config=smaller), decisions):
            possible.append(smaller)
    recomputed = decisions["use_gradient_checkpointing"]
    excess = 1.0
    if facts.total:
        excess = max(excess, needed / held_bytes(facts, recomputed))
    for smaller in possible:
        if facts.total:
            expected = excess * held_bytes(replace(facts, config=smaller), recomputed)
            fits = expected <= FILLED * facts.total
        else:
            fits = 2 * smaller.batch_size <= config.batch_size
        if fits:
            return smaller
    return possible[-1] if possible else None


def _policies_run(facts: Facts, decisions: Mapping[str, Decision]) -> bool:
    """Return whether all policies that run can run on these facts, too."""
    running = [POLICIES[name] for name, decision in decisions.items() if decision.runs]
    return all(policy.why_not(facts) is None for policy in running)
