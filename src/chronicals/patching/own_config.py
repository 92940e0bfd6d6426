"""A patched model's configuration is its own: what is written to it does not reach whoever else holds the same object.

Models may be made of one configuration, which says what they attend with. The modules get a shallow copy; when it goes back,
what was changed meanwhile (a vocabulary that grew) is carried over.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from chronicals.models.presentation import parts_of

KEPT = "_chronicals_configs"
"""Attribute of the model: its copies."""


@dataclass
class Copy:
    """A configuration of a patched model.

    Attributes:
        theirs: what it is a copy of.
        as_it_was: the fields of ``ours`` when it was made.
    """

    ours: Any
    theirs: Any
    as_it_was: dict[str, Any]


def take(model: nn.Module, configs: Collection[Any]) -> None:
    """Give the modules copies of ``configs``, and of those that hold one of them."""
    wanted = {id(config) for config in configs}
    copies: dict[int, Copy] = {}

    def ours(config: Any) -> Any:
        if id(config) not in copies:
            made = copy.copy(config)
            for name in config.sub_configs:
                if _holds(getattr(config, name, None), wanted):
                    setattr(made, name, ours(getattr(config, name)))
            copies[id(config)] = Copy(made, config, dict(vars(made)))
        return copies[id(config)].ours

    for module in model.modules():
        for name, value in vars(module).items():
            if _holds(value, wanted):
                vars(module)[name] = ours(value)
    setattr(model, KEPT, list(copies.values()))


def give_back(model: nn.Module) -> None:
    """The modules hold what they held, which has what was changed since."""
    copies = vars(model).pop(KEPT, [])
    for made in copies:
        changed = {name: x for name, x in vars(made.ours).items() if name not in made.as_it_was or x != made.as_it_was[name]}
        vars(made.theirs).update(changed)
    theirs = {id(made.ours): made.theirs for made in copies}
    for module in model.modules() if copies else ():
        for name, value in vars(module).items():
            vars(module)[name] = theirs.get(id(value), value)


def _holds(config: Any, wanted: Collection[int]) -> bool:
    return hasattr(config, "sub_configs") and any(id(part) in wanted for part in parts_of(config))
