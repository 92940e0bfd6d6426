"""The attention of one instance, replaced where its methods look transformers' functions up; configurations stay as they are.

A class of transformers reads the name in its configuration (``config._attn_implementation``) in two places: its attention
modules look up the function that attends, its model the function that makes the mask. Within a seam those methods of the
instance are copies of the class's, in which the functions are ours. A forward that somebody else put on the instance cannot be
copied so: its module holds a view of its configuration with another name, as long as it is in the seam. Seams can be stacked:
the last one that was put in is asked first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import AttentionInterface

from chronicals.models.rebinding import OURS, functions_beside, names_in, rebound

SEAMS = "_chronicals_seams"
"""Attribute of a module: by the name of an attribute, what the instance had there before, or None, and the seams in it."""

HOOKED = "_old_forward"
"""Attribute in which accelerate keeps the forward of a module that it put a hook on."""

CONFIG = "config"
"""Attribute in whose place a seam is put where the forward is somebody else's."""

Attention = Callable[..., Any]
"""transformers' interface: ``(module, query, key, value, attention_mask, **options)`` to ``(output, weights)``."""


@dataclass(frozen=True)
class Seam:
    """What attends, and how masks are made; this one leaves both as they are.

    Attributes:
        label: a word for it.
    """

    label: str

    def attend(self, name: str, own: Attention) -> Attention:
        """What runs in the place of ``own``, transformers' function for the implementation ``name``."""
        return own

    def name(self, name: str) -> str:
        """In the place of an implementation's name, the one by which causal masks are made: a key of transformers' table of
        mask functions, or, for no mask at all, any other name."""
        return name


NOTHING = Seam("nothing")


class Table:
    """In place of transformers' table of attention functions, for the methods of one seam."""

    def __init__(self, own: Any, seam: Seam):
        self.own, self.seam = own, seam

    def get_interface(self, name: str, default: Attention) -> Attention:
        return self.seam.attend(name, self.own.get_interface(name, default))

    def __getitem__(self, name: str) -> Attention:
        return self.seam.attend(name, self.own[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Named:
    """A view of a configuration in which attention has another name; of a call that makes a mask, or of one module."""

    def __init__(self, config: Any, seam: Seam):
        self._config, self._seam = config, seam
        self._attn_implementation = seam.name(config._attn_implementation)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Named:
        return Named(self._config.get_text_config(*args, **kwargs), self._seam)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._config, name)


def text_configs(model: Any) -> list[Any]:
    """The configurations that modules of the text hold: a layer that was copied has one of its own."""
    text = model.config.get_text_config()
    others = {id(part) for part in _parts_of(model.config)} - {id(text)}
    held = {id(value): value for module in model.modules() for value in vars(module).values() if type(value) is type(text)}
    return [config for key, config in ({id(text): text} | held).items() if key not in others]


def _parts_of(config: Any) -> Iterator[Any]:
    """The configuration, and those within it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts_of(part)


def places(model: Any) -> list[tuple[nn.Module, str]]:
    """The modules of the model's text, and the methods of theirs that look up what attends or what makes causal masks; none
    where no module looks up what attends."""
    texts = {id(config) for config in text_configs(model)}
    found, attends = [], False
    for module in model.modules():
        if isinstance(module, PreTrainedModel) or id(getattr(module, "config", None)) in texts:
            for name, attention in _methods(type(module)).items():  # type: ignore[arg-type]
                found.append((module, name))
                attends |= attention
    return found if attends else []


def who_stands_in_the_way(model: Any) -> str:
    """The class of a module whose method somebody else replaced or decorated, so that it cannot be copied; empty if there is
    none. Hooks of accelerate are none."""
    return next((type(module).__name__ for module, name in places(model) if _slot(module, name) == CONFIG), "")


def install(model: Any, seam: Seam) -> None:
    """Let ``seam`` attend in the text of ``model``; towers of other kinds keep their own."""
    for module, slot in dict.fromkeys((module, _slot(module, name)) for module, name in places(model)):
        before, seams = vars(module).setdefault(SEAMS, {}).setdefault(slot, (vars(module).get(slot), []))
        seams.append(seam)
        _refresh(module, slot, before, seams)


def remove(model: nn.Module, seam: Seam) -> None:
    """Take ``seam`` out again, the last one put in where it was put in several times; others stay where they are."""
    for module in model.modules():
        kept = vars(module).get(SEAMS, {})
        for slot, (before, seams) in list(kept.items()):
            if seam in seams:
                del seams[len(seams) - 1 - seams[::-1].index(seam)]
                _refresh(module, slot, before, seams)
            if not seams:
                del kept[slot]
        if not kept:
            vars(module).pop(SEAMS, None)


def is_in(model: nn.Module, seam: Seam) -> bool:
    """Whether ``seam`` is in ``model``."""
    return any(seam in seams for module in model.modules() for _, seams in vars(module).get(SEAMS, {}).values())


def _slot(module: nn.Module, name: str) -> str:
    """The attribute of the instance in which a seam is put for its method ``name``."""
    if name in vars(module).get(SEAMS, {}):
        return name
    slot = HOOKED if name == "forward" and HOOKED in vars(module) else name
    own = vars(module).get(slot)
    function: Any = getattr(type(module), name) if own is None else getattr(own, "__func__", None)
    known = function is getattr(type(module), name) or hasattr(function, OURS)
    return slot if known and _within(function, NOTHING) is not None else CONFIG


def _refresh(module: nn.Module, slot: str, before: Any, seams: list[Seam]) -> None:
    """Give the instance what goes through ``seams``."""
    if not seams and before is None:
        vars(module).pop(slot, None)
    elif not seams:
        vars(module)[slot] = before
    elif slot == CONFIG:
        vars(module)[slot] = functools.reduce(Named, seams, before)
    else:
        function: Any = getattr(type(module), slot) if before is None else before.__func__
        for seam in seams:
            function = _within(function, seam)
        vars(module)[slot] = MethodType(function, module)


@functools.cache
def _methods(cls: type[nn.Module]) -> dict[str, bool]:
    """``forward`` and what it calls on ``self``, as far as they look up what attends (True) or what makes masks (False)."""
    names, waiting = {}, ["forward"]
    while waiting:
        name = waiting.pop()
        function = getattr(cls, name, None)
        if name in names or not isinstance(inspect.unwrap(function), FunctionType):  # type: ignore[arg-type]
            continue
        inner = inspect.unwrap(function)  # type: ignore[arg-type]
        names[name] = _uses(inner)
        waiting += [n for n in names_in(inner.__code__) if isinstance(inspect.getattr_static(cls, n, None), FunctionType)]
    return {name: any(_attends(value) for value in uses.values()) for name, uses in names.items() if uses}


_MADE: dict[tuple, Callable | None] = {}


def _within(function: Callable, seam: Seam) -> Callable | None:
    """``function`` as it runs within ``seam``; the same object every time, for compiled code looks at it."""
    key = function, seam, functions_beside(function)
    if key not in _MADE:
        inner = inspect.unwrap(function)
        names = {name: _replaced(value, seam) for name, value in _uses(inner).items()}
        made = _MADE[key] = rebound(function, names, seam.label)
        if made is not None:
            setattr(made, OURS, seam.label)
    return _MADE[key]


def _uses(function: FunctionType) -> dict[str, Any]:
    """By their global names, what a function uses: tables of attention functions, functions that make causal masks, and those
    of its file that use them."""
    found = {name: function.__globals__.get(name) for name in names_in(function.__code__)}
    return {
        name: value for name, value in found.items() if _attends(value) or _makes_masks(value) or _is_beside(value, function)
    }


def _attends(value: Any) -> bool:
    return isinstance(value, (AttentionInterface, Table))


def _makes_masks(value: Any) -> bool:
    """Whether it is one of transformers' functions that make causal masks, or one of ours in its place."""
    known = isinstance(value, FunctionType) and value.__module__ == masking_utils.__name__
    return known and value.__name__ in CREATORS


def _is_beside(value: Any, function: FunctionType) -> bool:
    """Whether it is another function of the same file that makes masks."""
    if not isinstance(value, FunctionType) or value.__globals__.get("__file__") != function.__globals__.get("__file__"):
        return False
    made = (value.__globals__.get(name) for name in names_in(value.__code__))
    return any(_makes_masks(creator) for creator in made)


CREATORS = (
    "create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate",
)  # fmt: skip
"""Functions of ``transformers.masking_utils`` that take a configuration first."""


def _replaced(value: Any, seam: Seam) -> Any:
    if _attends(value):
        return Table(value, seam)
    if not _makes_masks(value):
        return _within(value, seam) or value

    @functools.wraps(value)
    def create(*args: Any, **options: Any) -> Any:
        if args:
            return value(Named(args[0], seam), *args[1:], **options)
        return value(**options | {"config": Named(options["config"], seam)})

    return create
