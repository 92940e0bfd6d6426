"""Check before the first step that a run fits in its GPU's memory, and advice for those that do not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.config import ALIASES, RECOMPUTE
from chronicals.memory import Estimate
from chronicals.policies.policy import Remedy, policies

logger = logging.getLogger(__name__)

FILLED = 0.95
"""Fraction of a GPU's memory that tensors can fill; the allocator loses some between blocks."""

LENGTH_STEP = 256
"""Tokens to which the longest length that fits is rounded down."""

GIB = 2**30

LEAN_LOGIT_ROWS = 1024
"""Rows of logits at a time, which need a quarter of the default's memory."""


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

    def held_by(estimate: Estimate) -> int:
        return estimate.needed(*(estimate.choice() if policy is None else (policy, 0)))

    held = held_by(memory)
    filled = FILLED * memory.total
    logger.info(
        "memory: at most %.1f GiB expected, of %.1f on the card", held / GIB, memory.total / GIB
    )
    if not config.check_memory or held <= filled:
        return
    length = longest_that_fits(
        config.max_seq_length, lambda length: held_by(estimated(length)) <= filled
    )
    shorter = f"the longest max_seq_length that fits as the run is set is {length:,}"
    if length == 0:
        shorter = (
            f"weights and states alone take {memory.fixed / GIB:.1f} GiB, so no shorter "
            "max_seq_length helps"
        )
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


def ways_to_take_less(
    config: ChronicalsConfig, ranks: int = 1, shorter_rows: bool = True
) -> list[str]:
    """Return the remedies of ``what_helps`` in words.

    Args:
        config: the configuration that does not fit.
        ranks: number of processes that train together.
        shorter_rows: include the last one, a shorter ``max_seq_length``.
    """
    words = []
    for fields, price in what_helps(config, ranks):
        if "max_seq_length" in fields and not shorter_rows:
            continue
        named = " with ".join(f"{field}={value}" for field, value in fields.items())
        words.append(f"{named} ({price})" if price else named)
    return words


def what_helps(config: ChronicalsConfig, ranks: int = 1) -> list[Remedy]:
    """Return remedies, those that cost only time first.

    Args:
        config: the configuration that does not fit.
        ranks: number of processes that train together.
    """
    remedies = []
    # Fewer tokens or logits at a time, for an unchanged step.
    if config.batch_size > 1:
        batch = config.batch_size // 2
        if "optimizer_in_backward" in config.memory_policies:
            remedies.append(Remedy({"batch_size": batch}, "fewer tokens a step"))
        else:
            count = 2 * config.gradient_accumulation_steps
            remedies.append(Remedy({"batch_size": batch, "gradient_accumulation_steps": count}))
    if config.logits_chunk_size > LEAN_LOGIT_ROWS:
        remedies.append(Remedy({"logits_chunk_size": LEAN_LOGIT_ROWS}))
    leanest = leanest_memory(config, ranks)
    if config.memory_policies != leanest:
        remedies.append(Remedy({"memory": sorted(leanest), **agreeing_switches(config)}))
    for policy in policies():
        remedies += policy.remedies(config, ranks)
    # Fewer trained values, a quantised base, or shorter rows.
    if not config.use_lora:
        masters = {} if config.master_weights else {"master_weights": True}
        price = "adapters are trained, not the weights"
        remedies.append(Remedy({"use_lora": True, **masters}, price))
    elif config.quantization is None and not config.use_fp8:
        remedies.append(Remedy({"quantization": "nf4"}, "the base is rounded to 4 bits"))
    if config.max_seq_length > 1:
        shorter = config.max_seq_length // 2
        remedies.append(Remedy({"max_seq_length": shorter}, "what is longer is split or cut"))
    return sorted(remedies, key=lambda remedy: bool(remedy.price))


def leanest_memory(config: ChronicalsConfig, ranks: int) -> set[str]:
    """Return the entries of ``memory`` with all that save memory at the cost of time only."""
    entries: set[str] = set(config.memory_policies - RECOMPUTE)
    for policy in policies():
        if policy.only_time:
            entry = ALIASES.get(policy.name, policy.name)
            entries.discard(entry)
            if policy.spares(config, ranks):
                entries.add(entry)
    return entries


def agreeing_switches(config: ChronicalsConfig) -> dict[str, bool]:
    """Return the switches that were set and must agree with the leanest ``memory``."""
    return dict.fromkeys(sorted(ALIASES.keys() & config.explicit), True)
