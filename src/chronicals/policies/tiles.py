"""Base of the policies that compute a part of every layer in tiles of rows."""

from __future__ import annotations

from chronicals.memory import makes_tiles
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Course, Decision, Policy, Stage


class TilingPolicy(Policy):
    """A policy that has an effect only on batches of more rows than a tile."""

    only_time = True
    stage = Stage.MODULES

    def tile(self, facts: Facts) -> int | None:
        """Return the rows of a tile; None for the usual number."""
        return None

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide as for any policy, but only for batches of more rows than a tile."""
        decision = super().decide(facts, course)
        if decision.runs and not makes_tiles(facts.tokens, self.tile(facts)):
            return Decision(self.name, False, "a batch has no more rows than a tile")
        return decision
