"""Check before the first step that a run fits in the memory of its GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.memory import Estimate
from chronicals.policies.advice import ways_to_take_less

logger = logging.getLogger(__name__)

FILLED = 0.95
"""Fraction of a GPU's memory that tensors can fill; the allocator loses some between blocks."""

LENGTH_STEP = 256
"""Tokens to which the longest length that fits is rounded down."""

GIB = 2**30


def refuse_what_cannot_fit(
    config: ChronicalsConfig,
    memory: Estimate,
    policy: str | None,
    estimated: Callable[[int], Estimate],
    ranks: int = 1,
) -> None:
    """Check that the run is expected to fit in its GPU's memory.

    Args:
        config: the configuration of the run.
        memory: estimate for the run as configured.
        policy: what every layer recomputes; None if the estimate chooses.
        estimated: returns the estimate of the run for a ``max_seq_length``.
        ranks: number of processes that train together.

    Raises:
        ConfigurationError: it is not; the message names remedies.
    """
    if not memory.total:
        return
    held = _held(memory, policy)
    logger.info(
        "memory: at most %.1f GiB expected, of %.1f on the card", held / GIB, memory.total / GIB
    )
    if not config.check_memory or _fits(memory, policy):
        return
    length = longest_that_fits(
        config.max_seq_length, lambda length: _fits(estimated(length), policy)
    )
    shorter = f"the longest max_seq_length that fits as the run is set is {length:,}"
    if length == 0:
        shorter = (
            f"weights and states alone take {memory.fixed / GIB:.1f} GiB, so no shorter "
            "max_seq_length helps"
        )
    filled = FILLED * memory.total
    message = (
        f"max_seq_length={config.max_seq_length}: a step would hold about {held / GIB:.1f} GiB, "
        f"and of the card's {memory.total / GIB:.1f} GiB tensors fill at most "
        f"{filled / GIB:.1f}: {(held - filled) / GIB:.1f} GiB are short; {shorter}."
    )
    ways = ways_to_take_less(config, ranks, shorter_rows=False)
    if ways:
        message += f" Less is taken by {'; or '.join(ways)}."
    raise ConfigurationError(f"{message} To start it all the same, set check_memory=False")


def longest_that_fits(asked: int, fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of ``LENGTH_STEP`` below ``asked`` that ``fits``, else 0.

    Found by bisection.
    """
    below = 0
    above = -(-asked // LENGTH_STEP)
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle * LENGTH_STEP):
            below = middle
        else:
            above = middle
    return below * LENGTH_STEP


def _held(memory: Estimate, policy: str | None) -> int:
    return memory.needed(*(memory.choice() if policy is None else (policy, 0)))


def _fits(memory: Estimate, policy: str | None) -> bool:
    return _held(memory, policy) <= FILLED * memory.total
