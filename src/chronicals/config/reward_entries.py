"""Entries of the field ``rewards``: what scores an answer, and its weight in the sum.

A text is ``PLACE=WEIGHT``; without a weight it counts once. A place is a function by its path
(``module:function``, or ``file.py:function``), a built-in reward with its argument
(``length(512)``), or the folder or hub name of a reward model. In Python an entry may also be the
function itself, or a pair of it and its weight.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticCustomError

from chronicals.config.values import as_value_list, lasting

WEIGHT = re.compile(r"=([^=()/:]*)$")
"""The weight at the end of an entry. A sign within brackets, or before a further part of a path,
belongs to the place."""

BUILT_IN = re.compile(r"(\w+)(?:\((.*)\))?", re.DOTALL)
"""A built-in reward, and its argument in brackets."""

DROP = "drop"
"""Value of ``reward_on_error`` by which a row whose reward failed leaves its group."""


@dataclass(frozen=True)
class RewardEntry:
    """One reward of a run.

    Attributes:
        place: path of a function, name of a built-in reward, folder or hub name of a model. Of a
            function that was given itself it is the path by which it may be imported.
        argument: text in the brackets behind a built-in reward.
        weight: factor of its values in the sum.
        function: the function or object, if it was given itself.
    """

    place: str
    argument: str | None = None
    weight: float = 1.0
    function: Callable[..., Any] | None = None

    @property
    def is_function(self) -> bool:
        """True if the place is the path of a function."""
        return ":" in self.place

    @property
    def is_model(self) -> bool:
        """True if the place is a folder or a hub name."""
        return not self.is_function and BUILT_IN.fullmatch(self.place) is None

    @property
    def name(self) -> str:
        """The place and its argument, without the weight."""
        return self.place if self.argument is None else f"{self.place}({self.argument})"

    def __str__(self) -> str:
        return self.name if self.weight == 1.0 else f"{self.name}={self.weight!r}"


def reward_entry(given: Any) -> RewardEntry:
    """Return an entry of ``rewards`` as it was given.

    Raises:
        PydanticCustomError: it is neither a text, a function, nor a pair of one and its weight; or
            the weight is no finite number.
    """
    if isinstance(given, (tuple, list)) and len(given) == 2:
        function, weight = given
    else:
        function, weight = given, 1.0
    if callable(function) or hasattr(function, "get_score"):
        return RewardEntry(path_of(function), weight=_weight(weight, given), function=function)
    if not isinstance(given, str) or not given.strip():
        raise PydanticCustomError(
            "reward",
            "{given} is no reward; give the path of a function as module:function, a built-in "
            "reward, the folder of a reward model or, in Python, the function itself",
            {"given": repr(given)},
        )
    text = given.strip()
    found = WEIGHT.search(text)
    place = text if found is None else text[: found.start()].strip()
    weight = 1.0 if found is None else _weight(found[1], given)
    built_in = None if os.path.exists(os.path.expanduser(place)) else BUILT_IN.fullmatch(place)
    if built_in is not None:
        return RewardEntry(built_in[1], built_in[2], weight)
    module, _, name = place.rpartition(".")
    if place.replace(".", "").isidentifier() and not os.path.exists(place):
        raise PydanticCustomError(
            "reward",
            "{given} names no function; a colon stands before its name: {meant}",
            {"given": repr(given), "meant": f"{module}:{name}"},
        )
    if ":" not in place:
        # A folder here whose name could be that of a built-in reward is written as a path.
        place = os.path.expanduser(place)
        return RewardEntry(place if os.sep in place else os.path.join(".", place), weight=weight)
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise PydanticCustomError(
            "reward", "{given} lacks a part; give module:function", {"given": repr(given)}
        )
    return RewardEntry(f"{os.path.expanduser(where)}:{name}", weight=weight)


def _weight(weight: Any, given: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise PydanticCustomError(
            "reward",
            "the weight of {given} is no finite number; give one as mine:exact=0.5",
            {"given": repr(given)},
        )
    return number


def path_of(function: Any) -> str:
    """Return ``module:name`` of a function, or of the class of an object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def as_entries(given: Any) -> Any:
    """Return a text as the list it represents, and a function as a list of it alone."""
    return [given] if callable(given) else as_value_list(given)


def as_rewards(given: list[Any]) -> list[Any]:
    """Return the entries as they are, each of which must be a reward of its own.

    Raises:
        PydanticCustomError: one is none, or is named twice.
    """
    seen = set[str]()
    for entry in map(reward_entry, given):
        if entry.function is None and entry.name in seen:
            raise PydanticCustomError(
                "reward", "{name} is named twice; keep one", {"name": repr(entry.name)}
            )
        seen.add(entry.name)
    return given


def reward_text(given: Any) -> str:
    """Return an entry as a recipe has it. A function that was given itself is its path."""
    return given if isinstance(given, str) else str(reward_entry(given))


def lasting_reward(given: Any) -> Any:
    """Return an entry whose file or folder has an absolute path, which holds anywhere."""
    if not isinstance(given, str):
        return given
    entry = reward_entry(given)
    where, _, name = entry.place.rpartition(":")
    if entry.is_model:
        return str(replace(entry, place=lasting(entry.place)))
    if where.endswith(".py"):
        return str(replace(entry, place=f"{lasting(where)}:{name}"))
    return given


def as_reward_on_error(value: Any) -> Any:
    """Return ``drop``, or the reward of an answer whose reward failed as a number.

    Raises:
        PydanticCustomError: it is neither.
    """
    if value == DROP:
        return value
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise PydanticCustomError(
            "reward_on_error", "takes drop, or the reward of such an answer as a finite number"
        )
    return number
