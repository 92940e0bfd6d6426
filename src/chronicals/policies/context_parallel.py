"""Packs shared by several processes (``context_parallel``); long documents are split among them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chronicals.attention import why_not_divided
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import TokenStore
from chronicals.distributed import Mesh
from chronicals.model_shape import ModelShape
from chronicals.models import PresentedModel, why_neighbours_matter
from chronicals.objectives import Objective
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Course, Decision, Load, Policy, register

logger = logging.getLogger(__name__)


class ContextParallel(Policy):
    """Several processes share each pack: whole documents, and parts of those too long for one."""

    name = "context_parallel"
    title = ""  # sharing_packs writes a log line of its own
    before_memory = True

    def asked(self, config: ChronicalsConfig) -> bool:
        return config.context_parallel > 1

    def why_not(self, facts: Facts) -> str | None:
        """Return why the model's documents cannot be split over processes; None if they can."""
        model = facts.model
        name = type(model).__name__
        if not facts.packed:
            return f"{name} takes documents as padded rows"
        if facts.one_by_one:
            return f"{name} attends to one document after the other"
        if facts.skips_layers:
            return f"{name} skips layers at random, each process others"
        if facts.records_routers:
            return f"the router loss of {name} is one of whole packs"
        neighbours = why_neighbours_matter(model.config, facts.config.max_seq_length)
        if neighbours:
            return neighbours
        shape = ModelShape.of(model.config)
        undivided = why_not_divided(shape.heads, shape.kv_heads, facts.exchanging)
        return undivided and f"{undivided}; context_heads=1 divides none"

    def decide(self, facts: Facts, course: Course) -> Decision:
        self.check(facts)
        if facts.context == 1:
            return Decision(self.name, False, "not asked for")
        return Decision(self.name, True, "as asked")

    def check(self, facts: Facts) -> None:
        """Check that the model can take shared packs, if they are configured.

        Raises:
            ConfigurationError: it cannot.
        """
        reason = self.why_not(facts) if facts.context > 1 else None
        if reason:
            raise ConfigurationError(
                f"context_parallel={facts.context}: {reason}; leave it out (or set it to 1)"
            )

    def bytes(self, facts: Facts, load: Load) -> Load:
        """Return ``load`` with a process's part of the tokens of a forward pass."""
        return replace(load, step=replace(load.step, tokens=load.step.tokens // facts.context))


CONTEXT_PARALLEL = register(ContextParallel())


def check_frozen_context(facts: Facts, frozen: Iterable[PresentedModel]) -> None:
    """Check that the objective's frozen models can take shared packs, if they are configured.

    Raises:
        ConfigurationError: one cannot.
    """
    for presented in frozen:
        other = replace(
            facts,
            model=presented.model,
            packed=presented.packed,
            one_by_one=presented.one_by_one,
            records_routers=presented.records_routers,
        )
        CONTEXT_PARALLEL.check(other)


def sharing_packs(ranks: Mesh, config: ChronicalsConfig, model: Any) -> Mesh:
    """Return the mesh with ``context_parallel`` ranks sharing each pack; all ranks must call it.

    Logs how they attend to split documents.

    Raises:
        ConfigurationError: the ranks or heads cannot be divided so.
    """
    number = config.context_parallel
    asked = config.context_heads
    if number == 1 and asked is not None:
        raise ConfigurationError(
            f"context_heads={asked}: no pack is shared; set context_parallel too, or leave it out"
        )
    if number == 1 or ranks.count % number:
        return ranks.sharing_packs(number)
    shape = ModelShape.of(model.config)
    machines = ranks.gather_values(socket.gethostname())
    inner = asked or exchanging(machines, number, shape.heads, shape.kv_heads)
    if ranks.writer:
        means = []
        if inner > 1:
            among = "all" if inner == number else f"{inner} neighbours"
            means.append(f"{among} exchange heads (all-to-all)")
        if inner < number:
            means.append(f"keys and values of {number // inner} are gathered")
        found = f"{len(set(machines))} machine(s), {shape.kv_heads} key heads"
        logger.info(
            "context_parallel=%d: to attend to split documents %s (%s)",
            number,
            ", and ".join(means),
            "as asked" if asked else found,
        )
    return ranks.sharing_packs(number, inner)


def exchanging(machines: Sequence[str], number: int, heads: int, key_heads: int) -> int:
    """Return the largest number of neighbouring ranks that can exchange heads.

    They share a pack and a machine, and their number divides query and key heads.

    Args:
        machines: name of the machine of each rank.
        number: ranks that share a pack.
        heads: query heads of the model.
        key_heads: key heads of the model.
    """
    for inner in range(number, 1, -1):
        divides = not (number % inner or heads % inner or key_heads % inner)
        if divides and all(
            len({*machines[first : first + inner]}) == 1 for first in range(0, len(machines), inner)
        ):
            return inner
    return 1


def check_dealt(store: TokenStore, objective: Objective, config: ChronicalsConfig) -> None:
    """Check that documents which the objective compares as a whole fit in a part of a pack.

    Otherwise log how many documents are split.

    Raises:
        ConfigurationError: the documents of an item do not fit.
    """
    parts = config.pack_parts or config.context_parallel
    field = "pack_parts" if config.pack_parts else "context_parallel"
    if parts == 1 or not len(store):
        return
    width = config.max_seq_length // parts
    totals = store.lengths
    if store.items is not None:
        totals = np.add.reduceat(store.lengths, store.items[:-1])
    long = int((totals > width).sum())
    if long and not objective.of_tokens:
        longest = int(totals.max())
        raise ConfigurationError(
            f"{field}={parts}: objective={config.objective!r} compares whole documents, which "
            f"must lie on one process, and those of {long} of {len(totals)} rows are longer than "
            f"max_seq_length / {parts} = {width} tokens: up to {longest}; raise max_seq_length to "
            f"{2 * parts * -(-longest // 2)}, or lower {field}"
        )
    logger.info(
        "%d of %d documents are longer than %d tokens: split over those that share packs",
        long,
        len(totals),
        width,
    )
