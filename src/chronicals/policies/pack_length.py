"""Tokens of a pack (``max_seq_length``), of which fewer take less memory and cut documents."""

from __future__ import annotations

from collections.abc import Iterator

from chronicals.config import ChronicalsConfig
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Course, Decision, Policy, Remedy, register_policy


class PackLength(Policy):
    """Documents that are longer than a pack are split or cut."""

    name = "max_seq_length"
    title = ""  # the length of a run says it

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return True: every pack has a length."""
        return True

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Return the length of a pack."""
        return Decision(self.name, True, f"{facts.config.max_seq_length} tokens a pack")

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield packs of half the length."""
        return self.remedies(facts.config, facts.ranks)

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield packs of half the length."""
        length = config.max_seq_length
        if length > 1:
            yield Remedy({self.name: length // 2}, "what is longer is split or cut")


register_policy(PackLength())
