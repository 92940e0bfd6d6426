"""Policies that a session can take on between two steps; they cost time and change no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from chronicals.memory import CHEAP, decoder_layers, enable_gradient_checkpointing
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.needed_memory import LEAN_LOGIT_ROWS
from chronicals.policies.policy import POLICIES
from chronicals.policies.recompute_layers import CHECKPOINTED, asked_recomputation
from chronicals.training.session import Session

RECOMPUTATION = "use_gradient_checkpointing"
OFFLOAD = "activation_offload"


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
    config = session.config
    if session.objective.chunk_size > LEAN_LOGIT_ROWS:
        words = f"logits_chunk_size becomes {LEAN_LOGIT_ROWS}"
        yield Addition(words, partial(setattr, session.objective, "chunk_size", LEAN_LOGIT_ROWS))
    if asked_recomputation(config) is None and _can_recompute(session):
        yield Addition("all layers are recomputed", partial(_recompute, session))
    permitted = config.memory is None and OFFLOAD not in config.explicit
    if permitted and _why_no_offload(session) is None:
        yield Addition("activations are offloaded to the host", partial(_offload, session))


def _can_recompute(session: Session) -> bool:
    """Return whether layers are left that are not recomputed whole, and can be."""
    decision = session.decisions[RECOMPUTATION]
    own = decision.runs and decision.layers == 0 and decision.how != CHEAP
    supported = getattr(session.model, "supports_gradient_checkpointing", False)
    is_left = decision.layers is not None and not own
    return is_left and supported and bool(decoder_layers(session.model))


def _recompute(session: Session) -> None:
    enable_gradient_checkpointing(session.model, session.facts.unfused is None)
    setattr(session.model.get_decoder(), CHECKPOINTED, True)
    decision = session.decisions[RECOMPUTATION]
    session.decide(replace(decision, runs=True, layers=None))


def _why_no_offload(session: Session) -> str | None:
    """Return why activations cannot be offloaded; None if they can."""
    if session.decisions[OFFLOAD].runs:
        return "they are already"
    standing = {name for name, decision in session.decisions.items() if decision.runs}
    standing |= conditions(session.facts)
    excluded = why_excluded(OFFLOAD, standing, session.facts)
    return excluded or POLICIES[OFFLOAD].why_not(session.facts)


def _offload(session: Session) -> None:
    session.decide(replace(session.decisions[OFFLOAD], runs=True))
    session.enter(POLICIES[OFFLOAD])
