"""Trials that need not be run, because the plan says that they cannot fit."""

from __future__ import annotations

from chronicals.config import Recipe


def why_too_large(recipe: Recipe) -> str | None:
    """Return why a run does not fit its card, by the plan; None if it does, or runs on the CPU.

    The memory is that of the card here, or what ``gpu_memory`` lets a run fill of it. The run
    itself would be refused by the same estimate; nothing is allocated for it.
    """
    from chronicals.planning.ways import card_here, planned_facts
    from chronicals.policies.fit import can_fit
    from chronicals.policies.needed_memory import FILLED, GIB, expected_memory
    from chronicals.policies.solver import fit_to_memory, settle_sharding

    sizes = [size for size in (card_here(), recipe.card_bytes) if size]
    if not sizes:
        return None
    total = min(sizes)
    facts = planned_facts(recipe, total, ranks=1)
    if recipe.fit != "off":
        fits = can_fit(facts)
        return None if fits else f"no settings that change no result fit {total / GIB:.1f} GiB"
    settled, sharding = settle_sharding(facts)
    fitted = fit_to_memory(settled, sharding, expected_memory(settled)[1])
    if fitted.held <= FILLED * total:
        return None
    return f"it would hold {fitted.held / GIB:.1f} GiB, and the card has {total / GIB:.1f}"
