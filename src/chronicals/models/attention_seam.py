"""Replaces the attention of one model instance, without changing its configuration or its class.

A model of transformers reads ``config._attn_implementation`` in two places: attention modules look
up the attention function by it, the model looks up the function that makes the mask. ``install``
puts copies of these methods on the instance, in which both lookups go through a ``Seam``.
accelerate keeps the forward of a module with a hook in ``_old_forward``; there the copy is put. A
forward that somebody else replaced cannot be copied. Its module gets a view of its configuration
instead, in which ``_attn_implementation`` has another value. Several seams can be installed at
once; the last one is asked first.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import AttentionInterface

from chronicals.models.rebinding import OURS, functions_beside, names_in, rebound

logger = logging.getLogger(__name__)

SEAMS = "_chronicals_seams"
"""Attribute of a module: by the name of a method, or ``CONFIG``, what was installed there
(``Installed``).
"""

HOOK = "_hf_hook"
HOOKED = "_old_forward"
"""Attributes in which accelerate keeps the hook of a module, and the module's own forward."""

CONFIG = "config"
"""Attribute that is replaced where the forward is somebody else's."""

Attention = Callable[..., Any]
"""transformers' interface: ``(module, query, key, value, attention_mask, **options)`` to
``(output, weights)``.
"""


@dataclass(frozen=True)
class Seam:
    """What attends, and how masks are made; this one leaves both as they are.

    Attributes:
        label: a word for it.
    """

    label: str

    def attend(self, name: str, own: Attention) -> Attention:
        """What runs in the place of ``own``, transformers' function for the implementation
        ``name``.
        """
        return own

    def name(self, name: str) -> str:
        """In the place of an implementation's name, the one by which causal masks are made: a
        key of transformers' table of mask functions, or, for no mask at all, any other name."""
        return name


NOTHING = Seam("nothing")


class AttentionFunctions:
    """In place of transformers' table of attention functions, for the methods of one seam."""

    def __init__(self, own: Any, seam: Seam):
        self.own = own
        self.seam = seam

    def get_interface(self, name: str, default: Attention) -> Attention:
        return self.seam.attend(name, self.own.get_interface(name, default))

    def __getitem__(self, name: str) -> Attention:
        return self.seam.attend(name, self.own[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class ConfigView:
    """A view of a configuration in which attention has another name; of a call that makes a
    mask, or of one module.
    """

    def __init__(self, config: Any, seam: Seam):
        self._config = config
        self._seam = seam
        self._attn_implementation = seam.name(config._attn_implementation)

    def get_text_config(self, *args: Any, **kwargs: Any) -> ConfigView:
        return ConfigView(self._config.get_text_config(*args, **kwargs), self._seam)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._config, name)


def text_configs(model: Any) -> list[Any]:
    """The configurations that modules of the text hold: a layer that was copied has one of its
    own.
    """
    config = _behind(model.config)
    text = config.get_text_config()
    others = {id(part) for part in _parts_of(config)} - {id(text)}
    values = (_behind(value) for module in model.modules() for value in vars(module).values())
    held = {id(value): value for value in values if type(value) is type(text)}
    return [config for key, config in ({id(text): text} | held).items() if key not in others]


def _behind(config: Any) -> Any:
    """The configuration itself where ``config`` is a view of one."""
    while isinstance(config, ConfigView):
        config = vars(config)["_config"]
    return config


def _parts_of(config: Any) -> Iterator[Any]:
    """The configuration, and those within it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts_of(part)


def places(model: Any) -> list[tuple[nn.Module, str]]:
    """The modules of the model's text, and the methods of theirs that look up what attends or
    what makes causal masks; none where no module looks up what attends."""
    texts = {id(config) for config in text_configs(model)}
    found = []
    attends = False
    for module in model.modules():
        if (
            isinstance(module, PreTrainedModel)
            or id(_behind(getattr(module, "config", None))) in texts
        ):
            for name, attention in _methods(type(module)).items():  # type: ignore[arg-type]
                found.append((module, name))
                attends |= attention
    return found if attends else []


def foreign_forward(model: Any) -> str:
    """The class of a module whose method somebody else replaced or decorated, so that it cannot
    be copied; empty if there is none. Hooks of accelerate are none."""
    return next(
        (type(module).__name__ for module, name in places(model) if _slot(module, name) == CONFIG),
        "",
    )


NOT_WHOLE = (
    "a patched model cannot be serialised whole: save its state_dict() or use save_pretrained, or "
    "call "
    "unpatch_model(model) first"
)
"""Why a model with methods that were made for it is written to no file: it could not be read."""


@dataclass
class Installed:
    """What was put in the place of a method of one module, or of its configuration.

    Attributes:
        before: what the instance had there, or None where it had the method of its class.
        seams: in the order in which they were installed.
        ours: the function, or the view, that was put there last.
    """

    before: Any
    seams: list[Seam]
    ours: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_WHOLE)

    def __deepcopy__(self, memo: dict) -> Installed:
        return Installed(
            *(copy.deepcopy(value, memo) for value in (self.before, self.seams, self.ours))
        )


def install(model: Any, seam: Seam) -> None:
    """Let ``seam`` attend in the text of ``model``; towers of other kinds keep their own."""
    for module, slot in dict.fromkeys(
        (module, _slot(module, name)) for module, name in places(model)
    ):
        installed = vars(module).setdefault(SEAMS, {})
        if slot not in installed:
            installed[slot] = Installed(vars(module).get(_attribute(module, slot)), [])
        installed[slot].seams.append(seam)
        _refresh(module, slot, installed[slot])


def remove(model: nn.Module, seam: Seam) -> None:
    """Take ``seam`` out again, the last one put in where it was put in several times; others
    stay where they are.
    """
    for module in model.modules():
        installed = vars(module).get(SEAMS, {})
        for slot, there in list(installed.items()):
            if seam in there.seams:
                del there.seams[len(there.seams) - 1 - there.seams[::-1].index(seam)]
                _refresh(module, slot, there)
            if not there.seams:
                del installed[slot]
        if not installed:
            vars(module).pop(SEAMS, None)


def is_in(model: nn.Module, seam: Seam) -> bool:
    """Whether ``seam`` is in ``model``."""
    return any(
        seam in there.seams
        for module in model.modules()
        for there in vars(module).get(SEAMS, {}).values()
    )


def module_without(model: Any, seam: Seam) -> str:
    """The class of a module that would attend, or make masks, without ``seam``; empty if there
    is none.
    """
    for module, name in places(model):
        installed = vars(module).get(SEAMS, {})
        through = [
            slot for slot in (name, CONFIG) if slot in installed and seam in installed[slot].seams
        ]
        if not any(_is_ours(module, _attribute(module, slot), installed[slot]) for slot in through):
            return type(module).__name__
    return ""


def _attribute(module: nn.Module, slot: str) -> str:
    """The attribute of the instance in which ``slot`` is: under accelerate's hook, where the
    hook looks for the forward.
    """
    return HOOKED if slot == "forward" and HOOK in vars(module) and HOOKED in vars(module) else slot


def _is_ours(module: nn.Module, attribute: str, installed: Installed) -> bool:
    """Whether what stands in ``attribute`` is what was put there."""
    there = vars(module).get(attribute)
    return getattr(there, "__func__", there) is installed.ours


def _found(module: nn.Module, slot: str, installed: Installed) -> str | None:
    """The attribute in which our function or view is now: accelerate's hooks move it. None where
    it is in none.
    """
    attributes = (slot, HOOKED) if slot == "forward" else (slot,)
    return next(
        (attribute for attribute in attributes if _is_ours(module, attribute, installed)), None
    )


def _slot(module: nn.Module, name: str) -> str:
    """What a seam is put into for the method ``name``: the method, or ``CONFIG`` where it is
    somebody else's.
    """
    installed = vars(module).get(SEAMS, {}).get(name)
    attribute = _attribute(module, name)
    if installed is not None:
        return name if _is_ours(module, attribute, installed) else CONFIG
    own = vars(module).get(attribute)
    function: Any = getattr(type(module), name) if own is None else getattr(own, "__func__", None)
    known = function is getattr(type(module), name) or hasattr(function, OURS)
    return name if known and _within(function, NOTHING) is not None else CONFIG


def _refresh(module: nn.Module, slot: str, installed: Installed) -> None:
    """Give the instance what goes through the seams; what somebody else put there since is left
    alone, and reported.
    """
    attribute = (
        _attribute(module, slot) if installed.ours is None else _found(module, slot, installed)
    )
    if attribute is None:
        logger.warning(
            "%s.%s was replaced by something else, and is left as it is",
            type(module).__name__,
            slot,
        )
    elif slot == CONFIG:
        installed.ours = vars(module)[attribute] = functools.reduce(
            ConfigView, installed.seams, installed.before
        )
    elif not installed.seams and installed.before is not None:
        vars(module)[attribute] = installed.before
    elif not installed.seams and attribute == slot:
        vars(module).pop(attribute, None)
    else:
        function: Any = (
            getattr(type(module), slot) if installed.before is None else installed.before.__func__
        )
        for seam in installed.seams:
            function = _within(function, seam)
        installed.ours = function
        vars(module)[attribute] = MethodType(function, module)


@functools.cache
def _methods(cls: type[nn.Module]) -> dict[str, bool]:
    """``forward`` and what it calls on ``self``, as far as they look up what attends (True) or
    what makes masks (False).
    """
    names = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        function = getattr(cls, name, None)
        if name in names or not isinstance(inspect.unwrap(function), FunctionType):  # type: ignore[arg-type]
            continue
        inner = inspect.unwrap(function)  # type: ignore[arg-type]
        names[name] = _uses(inner)
        waiting += [
            n
            for n in names_in(inner.__code__)
            if isinstance(inspect.getattr_static(cls, n, None), FunctionType)
        ]
    return {
        name: any(_attends(value) for value in uses.values())
        for name, uses in names.items()
        if uses
    }


_MADE: dict[tuple, Callable | None] = {}


def _within(function: Callable, seam: Seam) -> Callable | None:
    """``function`` as it runs within ``seam``; the same object every time, for compiled code
    looks at it.
    """
    key = function, seam, functions_beside(function)
    if key not in _MADE:
        inner = inspect.unwrap(function)
        names = {name: _replaced(value, seam) for name, value in _uses(inner).items()}
        made = _MADE[key] = rebound(function, names, seam.label)
        if made is not None:
            setattr(made, OURS, seam.label)
    return _MADE[key]


def _uses(function: FunctionType) -> dict[str, Any]:
    """By their global names, what a function uses: tables of attention functions, functions that
    make causal masks, and those of its file that use them."""
    found = {name: function.__globals__.get(name) for name in names_in(function.__code__)}
    return {
        name: value
        for name, value in found.items()
        if _attends(value) or _makes_masks(value) or _is_beside(value, function)
    }


def _attends(value: Any) -> bool:
    return isinstance(value, (AttentionInterface, AttentionFunctions))


def _makes_masks(value: Any) -> bool:
    """Whether it is one of transformers' functions that make causal masks, or one of ours in its
    place.
    """
    known = isinstance(value, FunctionType) and value.__module__ == masking_utils.__name__
    return known and value.__name__ in CREATORS


def _is_beside(value: Any, function: FunctionType) -> bool:
    """Whether it is another function of the same file that makes masks."""
    if not isinstance(value, FunctionType) or value.__globals__.get(
        "__file__"
    ) != function.__globals__.get("__file__"):
        return False
    made = (value.__globals__.get(name) for name in names_in(value.__code__))
    return any(_makes_masks(creator) for creator in made)


CREATORS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)
"""Functions of ``transformers.masking_utils`` that take a configuration first."""


def _replaced(value: Any, seam: Seam) -> Any:
    if _attends(value):
        return AttentionFunctions(value, seam)
    if not _makes_masks(value):
        return _within(value, seam) or value

    @functools.wraps(value)
    def create(*args: Any, **options: Any) -> Any:
        if args:
            return value(ConfigView(args[0], seam), *args[1:], **options)
        return value(**options | {"config": ConfigView(options["config"], seam)})

    return create
