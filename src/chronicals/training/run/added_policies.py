"""Policies that a session can take on between two steps; they cost time and change no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from chronicals.policies.policy import Decision, Policy, Running, policies_by_cost
from chronicals.training.session import Session


class Addition(NamedTuple):
    """A policy that a session does not have yet.

    Attributes:
        words: what it is, for the log.
        start: makes the session's next step have it.
    """

    words: str
    start: Callable[[], None]


def additions(session: Session) -> Iterator[Addition]:
    """Yield the policies that can be added to a session, the cheapest in time first.

    What the configuration sets otherwise is left as it was set.
    """
    running = Running(session.facts, session.decisions, session.model, session.objective)
    for policy in policies_by_cost():
        decision = policy.addition(running)
        if decision is not None:
            start = partial(_start, session, policy, running, decision)
            yield Addition(decision.reason, start)


def _start(session: Session, policy: Policy, running: Running, decision: Decision) -> None:
    policy.join(running, decision)
    session.decide(decision)
    session.enter(policy)
