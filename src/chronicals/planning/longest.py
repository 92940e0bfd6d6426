"""The preset ``long-context``: the longest document that fits a card, by the shapes of the model."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.presets import LONG_PRESET
from chronicals.planning.ways import GIGA, planned_facts
from chronicals.policies.facts import Facts
from chronicals.policies.fit import can_fit, leanest_first, run_fits, what_would_do

GRANULE = 1024
"""Tokens between two lengths that are tried."""

MOST = 2**24
"""Tokens beyond which no length is tried."""


def longest_document(recipe: Recipe, total: int, ranks: int = 1) -> int:
    """Return the most tokens of a pack with which a run fits its cards, a multiple of ``GRANULE``.

    A pack may be one document. Settings that change no result are taken as ``fit`` takes them. What
    a run needs grows with its packs, so lengths are bisected for each settings with which a longer
    pack fits than with those before. Nothing is allocated.

    Args:
        recipe: the recipe; its ``max_seq_length`` does not count.
        total: bytes of a card that the run may fill.
        ranks: number of cards that train together.

    Raises:
        ConfigurationError: not even ``GRANULE`` tokens fit; the message names the smallest card, or
            the number of cards, that would do.
    """
    facts = planned_facts(recipe.replace(max_seq_length=GRANULE), total, ranks)
    found = 0
    # every setting is offered for the longest packs, some not for short ones
    for config in leanest_first(of_length(facts, MOST // GRANULE)):
        taken = replace(facts, config=config)

        def is_too_long(granules: int, taken: Facts = taken) -> bool:
            return not run_fits(of_length(taken, granules))

        if is_too_long(found + 1):
            continue
        longer = range(found + 1, MOST // GRANULE + 1)
        found += bisect_left(longer, True, key=is_too_long)
    if found and not can_fit(of_length(facts, found)):  # what fits is not offered at this length
        shorter = range(1, found)
        found = bisect_left(shorter, True, key=lambda count: not can_fit(of_length(facts, count)))
    if found:
        return found * GRANULE
    enough = what_would_do(facts)
    would = f"; {enough} would do" if enough else ""
    raise ConfigurationError(
        f"preset={LONG_PRESET!r}: not even {GRANULE:,} tokens of this model fit "
        f"{ranks} x {total / GIGA:.3g} GB{would}"
    )


def of_length(facts: Facts, granules: int) -> Facts:
    """Return a run with packs of so many times ``GRANULE`` tokens."""
    return replace(facts, config=facts.config.fitted(max_seq_length=granules * GRANULE))
