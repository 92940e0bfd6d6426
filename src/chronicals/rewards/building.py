"""The rewards that a configuration names, started before a model is loaded."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.reward_entries import RewardEntry, path_of, reward_entry
from chronicals.rewards.built_in import BUILT_IN
from chronicals.rewards.kinds import FunctionApart, FunctionHere, Reward
from chronicals.rewards.reward_model import RewardModel
from chronicals.rewards.scoring import Rewards

logger = logging.getLogger(__name__)


def build_rewards(config: ChronicalsConfig) -> Rewards:
    """Start the rewards of a configuration, before a model is loaded.

    Raises:
        ConfigurationError: there is none, or one cannot be had; the message has a line for each.
    """
    if not config.rewards:
        raise ConfigurationError(
            f"rewards: none is given, and objective={config.objective!r} learns from nothing else; "
            "give the path of a function, as rewards=['mine:exact'], or a built-in reward: "
            f"{', '.join(BUILT_IN)}"
        )
    entries = [reward_entry(given) for given in config.rewards]
    with ThreadPoolExecutor(len(entries)) as starting:
        waiting = [starting.submit(_built, entry, config) for entry in entries]
    rewards = dict[str, Reward]()
    lines = []
    for name, entry, started in zip(_names(entries), entries, waiting):
        try:
            rewards[name] = started.result()
        except ValueError as error:
            lines.append(f"rewards={str(entry)!r}: {error}")
    if lines:
        for reward in rewards.values():
            reward.close()
        raise ConfigurationError("\n".join(lines))
    return Rewards(rewards, [entry.weight for entry in entries], config.reward_on_error)


def _built(entry: RewardEntry, config: ChronicalsConfig) -> Reward:
    """Return the reward of an entry, started.

    Raises:
        ValueError: it cannot be had.
    """
    if entry.is_model:
        return RewardModel(entry.place, config.mixed_precision)
    if not entry.is_function and entry.place not in BUILT_IN:
        raise ValueError(
            f"there is no such built-in reward; there are {', '.join(BUILT_IN)}, and a function of "
            "yours is named as module:function"
        )
    if entry.function is None:
        return FunctionApart(entry.place, entry.argument, config.reward_timeout)
    if _is_importable(entry.function):
        with contextlib.suppress(ValueError):  # a module may exist in this process alone
            return FunctionApart(entry.place, None, config.reward_timeout)
    here = FunctionHere(entry.function)
    logger.warning(
        "rewards: %s cannot be imported by another process, so it runs in this one: it is neither "
        "timed (reward_timeout) nor ended if it hangs, and the run ends with it; give it a module "
        "of its own, and name it as module:function",
        entry.place,
    )
    return here


def _is_importable(function: Callable[..., Any]) -> bool:
    """Return whether another process finds this function by its path."""
    where, _, name = path_of(function).partition(":")
    if where == "__main__":
        return False
    found: Any = sys.modules.get(where)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _names(entries: Sequence[RewardEntry]) -> list[str]:
    """Return the last part of each place, with a number where several are the same."""
    names: list[str] = []
    counts = Counter[str]()
    for entry in entries:
        function = entry.place.rpartition(":")[2].rpartition(".")[2]
        name = function if entry.is_function else Path(entry.place).name
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return names
