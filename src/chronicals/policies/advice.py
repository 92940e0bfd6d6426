"""Advice for a run that does not fit in memory, shown in its error."""

from __future__ import annotations

from collections.abc import Iterator

from chronicals.config import ChronicalsConfig
from chronicals.config.config import ALIASES, RECOMPUTE
from chronicals.policies.policy import Remedy, policies

LEAN_LOGIT_ROWS = 1024
"""Rows of logits at a time, which need a quarter of the default's memory."""


def ways_to_take_less(
    config: ChronicalsConfig, ranks: int = 1, shorter_rows: bool = True
) -> list[str]:
    """Return the remedies of ``what_helps`` in words.

    Args:
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
    remedies = list(_smaller_pieces(config))
    leanest = leanest_memory(config, ranks)
    if config.memory_policies != leanest:
        remedies.append(Remedy({"memory": sorted(leanest), **agreeing_switches(config)}))
    for policy in policies():
        remedies += policy.remedies(config, ranks)
    remedies += _smaller_runs(config)
    return sorted(remedies, key=lambda remedy: bool(remedy.price))


def _smaller_pieces(config: ChronicalsConfig) -> Iterator[Remedy]:
    """Yield remedies with fewer tokens or logits at a time, for an unchanged step."""
    if config.batch_size > 1:
        batch = config.batch_size // 2
        if "optimizer_in_backward" in config.memory_policies:
            yield Remedy({"batch_size": batch}, "fewer tokens a step")
        else:
            count = 2 * config.gradient_accumulation_steps
            yield Remedy({"batch_size": batch, "gradient_accumulation_steps": count})
    if config.logits_chunk_size > LEAN_LOGIT_ROWS:
        yield Remedy({"logits_chunk_size": LEAN_LOGIT_ROWS})


def _smaller_runs(config: ChronicalsConfig) -> Iterator[Remedy]:
    """Yield remedies with fewer trained values, a quantised base, or shorter rows."""
    if not config.use_lora:
        masters = {} if config.master_weights else {"master_weights": True}
        yield Remedy({"use_lora": True, **masters}, "adapters are trained, not the weights")
    elif config.quantization is None and not config.use_fp8:
        yield Remedy({"quantization": "nf4"}, "the base is rounded to 4 bits")
    if config.max_seq_length > 1:
        shorter = config.max_seq_length // 2
        yield Remedy({"max_seq_length": shorter}, "what is longer is split or cut")


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
