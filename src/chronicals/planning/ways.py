"""The preset ``auto``: the first way to train that fits a card, by the shapes of the model."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.presets import AUTO_PRESET, WAYS
from chronicals.distributed import Mesh
from chronicals.memory import card_memory
from chronicals.objectives import build_objective
from chronicals.planning.planned_models import planned_model
from chronicals.policies import Facts
from chronicals.policies.facts import expected_backend, fillable
from chronicals.policies.fit import GIGA, can_fit, what_would_do
from chronicals.policies.frozen_models import planned_frozen
from chronicals.policies.sharding import choose_sharding, smallest_card
from chronicals.policies.solver import settle_sharding

logger = logging.getLogger(__name__)


def with_way(recipe: Recipe, total: int, ranks: int = 1) -> Recipe:
    """Return a recipe of the preset ``auto`` with the first of ``WAYS`` that fits the cards.

    A way that contradicts a field that was set is not tried. Nothing is allocated.

    Args:
        recipe: the recipe, with ``fit`` set.
        total: bytes of a card that the run may fill; 0 without one.
        ranks: number of cards that train together.

    Raises:
        ConfigurationError: there is no card, or no way fits it; the message names the smallest
            card, or the number of cards, that would do.
    """
    if not total:
        raise ConfigurationError(
            f"preset={AUTO_PRESET!r}: there is no card here; name one by gpu_memory where a plan "
            "is made, or a way and a card, as preset='qlora-24gb'"
        )
    facts: Facts | None = None
    for way, fields in WAYS.items():
        if any(getattr(recipe, name) != fields[name] for name in recipe.explicit & fields.keys()):
            continue
        try:
            changed = recipe.replace(**fields)
        except ConfigurationError:  # another field asks for another way, as load_in_4bit
            continue
        facts = planned_facts(changed, total, ranks)
        if can_fit(facts):
            logger.info("preset auto: %s, the first way that fits the card", way)
            return changed
    assert facts is not None, "each combination of the fields of ways is one of them"
    enough = what_would_do(facts)
    would = f"; {enough} would do" if enough else ""
    raise ConfigurationError(
        f"preset={AUTO_PRESET!r}: no way to train this model fits {ranks} x {total / GIGA:.3g} GB"
        f"{would}"
    )


def with_way_of_this_machine(recipe: Recipe) -> Recipe:
    """Return a recipe of the preset ``auto`` with the way that fits the cards of this run."""
    ranks = Mesh.current()
    total = fillable(smallest_card(ranks), recipe)
    return with_way(recipe, total, ranks.count)


def card_here() -> int:
    """Return the bytes of this process's card; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return card_memory(torch.device("cuda", torch.cuda.current_device()))


def planned_facts(recipe: Recipe, total: int, ranks: int) -> Facts:
    """Return the facts of a recipe's run on so many cards of ``total`` bytes."""
    config = recipe.config()
    facts = Facts(
        config,
        planned_model(recipe, config),
        ranks,
        config.context_parallel,
        backend=expected_backend(config, ""),
        here=ranks,
        total=total,
        frozen_models=planned_frozen(build_objective(config), config),
    )
    facts = replace(facts, config=config.fitted(sharding=choose_sharding(facts)))
    return settle_sharding(facts)[0]
