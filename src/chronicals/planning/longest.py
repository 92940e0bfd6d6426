"""The preset ``long-context``: the longest document that fits a card, by the shapes of the model."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.presets import LONG_PRESET
from chronicals.planning.ways import GIGA, planned_facts
from chronicals.policies.fit import can_fit, what_would_do

GRANULE = 1024
"""Tokens between two lengths that are tried."""

MOST = 2**24
"""Tokens beyond which no length is tried."""


def longest_document(recipe: Recipe, total: int, ranks: int = 1) -> int:
    """Return the most tokens of a pack with which a run fits its cards, a multiple of ``GRANULE``.

    A pack may be one document. Settings that change no result are taken as ``fit`` takes them. What
    a run needs grows with its packs, so lengths are bisected. Nothing is allocated.

    Args:
        recipe: the recipe; its ``max_seq_length`` does not count.
        total: bytes of a card that the run may fill.
        ranks: number of cards that train together.

    Raises:
        ConfigurationError: not even ``GRANULE`` tokens fit; the message names the smallest card, or
            the number of cards, that would do.
    """
    facts = planned_facts(recipe.replace(max_seq_length=GRANULE), total, ranks)
    if not can_fit(facts):
        enough = what_would_do(facts)
        would = f"; {enough} would do" if enough else ""
        raise ConfigurationError(
            f"preset={LONG_PRESET!r}: not even {GRANULE:,} tokens of this model fit "
            f"{ranks} x {total / GIGA:.3g} GB{would}"
        )

    def is_too_long(length: int) -> bool:
        config = facts.config.fitted(max_seq_length=length)
        return not can_fit(replace(facts, config=config))

    lengths = range(GRANULE, MOST + 1, GRANULE)
    return lengths[bisect_left(lengths, True, key=is_too_long) - 1]
