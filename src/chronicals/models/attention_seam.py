"""Replaces the attention of one model instance, without changing its configuration or its class.

A transformers model reads ``config._attn_implementation`` in two places: attention modules look up
the attention function by it, and the model looks up the function that makes the mask. ``install_seam``
puts copies of these methods on the instance. In the copies both lookups go through a ``Seam``.

accelerate keeps the forward of a module with a hook in ``_old_forward``; the copy is put there. A
forward that other code replaced cannot be copied. Its module gets a view of its configuration
instead, with another value of ``_attn_implementation``. Several seams can be installed at once; the
last one is asked first.
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

from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import AttentionInterface

from chronicals.models.rebinding import REPLACEMENT, functions_beside, names_in, rebound

logger = logging.getLogger(__name__)

SEAMS = "_chronicals_seams"
"""Attribute of a module: its ``InstalledSeams`` records, by the name of a method or ``CONFIG``."""

HOOK = "_hf_hook"
HOOKED = "_old_forward"
"""Attributes in which accelerate keeps the hook of a module, and the module's own forward."""

CONFIG = "config"
"""Attribute that is replaced if other code replaced the forward."""

PASS = "pass_over_pages"
"""Argument by which a pass over stored keys and values travels through a model's modules.

Its method ``attend`` takes an attention module, queries, keys and values of the new tokens, and
their ``Scores``.
"""

Attention = Callable[..., Any]
"""A transformers attention function.

It maps ``(module, query, key, value, attention_mask, **options)`` to ``(output, weights)``.
"""


@dataclass(frozen=True)
class Scores:
    """Mask and changes of the scores of one attention layer.

    Attributes:
        scale: factor.
        window: a token attends to itself and the ``window - 1`` before it; None for all.
        softcap: bound, or None.
        sinks: ``[H]``, the logit of an extra key, or None.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class Seam:
    """A replacement of the attention function and of the mask lookup; this base replaces neither.

    Attributes:
        label: a short name.
    """

    label: str

    def attend(self, name: str, own: Attention) -> Attention:
        """Return the function to use instead of ``own``, the attention function of ``name``."""
        return own

    def name(self, name: str) -> str:
        """Return the implementation name by which causal masks are made, instead of ``name``.

        The result is a key of transformers' table of mask functions. With any other name no mask is
        made.
        """
        return name


@dataclass(frozen=True)
class SoleAttention(Seam):
    """A seam that has one attention function for all names, and no masks made.

    Attributes:
        attention: the function.
        key: its name in transformers' table of attention functions, which the table of mask
            functions does not have.
    """

    attention: Attention
    key: str

    def attend(self, name: str, own: Attention) -> Attention:
        """Return ``attention``, whatever function the configuration names."""
        return self.attention

    def name(self, name: str) -> str:
        """Return ``key``, by which no mask is made."""
        return self.key


_NOTHING = Seam("nothing")


class AttentionFunctions:
    """A stand-in for transformers' table of attention functions; lookups go through a seam."""

    def __init__(self, own: Any, seam: Seam):
        self.own = own
        self.seam = seam

    def get_interface(self, name: str, default: Attention) -> Attention:
        """Return the attention function of ``name`` as the seam replaces it."""
        return self.seam.attend(name, self.own.get_interface(name, default))

    def __getitem__(self, name: str) -> Attention:
        return self.seam.attend(name, self.own[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class ConfigView:
    """A view of a configuration whose ``_attn_implementation`` is the name that a seam gives.

    It is passed to one mask function, or replaces the configuration of one module.
    """

    def __init__(self, config: Any, seam: Seam):
        self._config = config
        self._seam = seam
        self._attn_implementation = seam.name(config._attn_implementation)

    def get_text_config(self, *args: Any, **kwargs: Any) -> ConfigView:
        """Return a view of the text configuration, with the same seam."""
        return ConfigView(self._config.get_text_config(*args, **kwargs), self._seam)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # A copy reads attributes before the instance has any state.
            raise AttributeError(name)
        return getattr(self._config, name)


TABLES = (AttentionInterface, AttentionFunctions)
"""Classes of tables of attention functions: transformers' own, and our stand-in."""


def text_configs(model: Any) -> list[Any]:
    """Return the text configurations that the modules hold; a deep-copied layer holds its own."""
    config = _behind(model.config)
    text = config.get_text_config()
    others = {id(part) for part in _parts_of(config)} - {id(text)}
    values = (_behind(value) for module in model.modules() for value in vars(module).values())
    held = {id(value): value for value in values if type(value) is type(text)}
    return [config for key, config in ({id(text): text} | held).items() if key not in others]


def _behind(config: Any) -> Any:
    """Return the configuration itself if ``config`` is a view of one."""
    while isinstance(config, ConfigView):
        config = vars(config)["_config"]
    return config


def _parts_of(config: Any) -> Iterator[Any]:
    """Yield the configuration and all configurations nested in it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts_of(part)


def places(model: Any) -> list[tuple[nn.Module, str]]:
    """Return the text model's modules with the names of their methods that use a lookup.

    These methods look up the attention function or make causal masks. The list is empty if no
    module looks up the attention function.
    """
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
    """Return the class of a module whose method other code replaced or decorated; empty if none.

    Such a method cannot be copied. Hooks of accelerate do not count.
    """
    return next(
        (type(module).__name__ for module, name in places(model) if _slot(module, name) == CONFIG),
        "",
    )


NOT_WHOLE = (
    "a patched model cannot be serialised whole: save its state_dict() or use save_pretrained, or "
    "call "
    "unpatch_model(model) first"
)
"""Error text: a model with generated methods is not serialised, since it could not be read back."""


@dataclass
class InstalledSeams:
    """A replacement of one module's method or configuration.

    Attributes:
        before: the attribute that the instance had, or None if it used the method of its class.
        seams: seams in the order of installation.
        ours: the function or the view that was installed last.
    """

    before: Any
    seams: list[Seam]
    ours: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_WHOLE)

    def __deepcopy__(self, memo: dict) -> InstalledSeams:
        return InstalledSeams(
            *(copy.deepcopy(value, memo) for value in (self.before, self.seams, self.ours))
        )


def install_seam(model: Any, seam: Seam) -> None:
    """Route the attention of the text model through ``seam``; other towers keep their own."""
    for module, slot in dict.fromkeys(
        (module, _slot(module, name)) for module, name in places(model)
    ):
        installed = vars(module).setdefault(SEAMS, {})
        if slot not in installed:
            installed[slot] = InstalledSeams(vars(module).get(_attribute(module, slot)), [])
        installed[slot].seams.append(seam)
        _refresh(module, slot, installed[slot])


def remove_seam(model: nn.Module, seam: Seam) -> None:
    """Remove the latest installation of ``seam``; other installations stay."""
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


def module_without(model: Any, seam: Seam) -> str:
    """Return the class of a module that attends or makes masks without ``seam``; empty if none."""
    for module, name in places(model):
        installed = vars(module).get(SEAMS, {})
        through = [
            slot for slot in (name, CONFIG) if slot in installed and seam in installed[slot].seams
        ]
        if not any(_is_ours(module, _attribute(module, slot), installed[slot]) for slot in through):
            return type(module).__name__
    return ""


def _attribute(module: nn.Module, slot: str) -> str:
    """Return the attribute of the instance that holds ``slot``.

    It is ``_old_forward`` for the forward of a module under accelerate's hook.
    """
    own = vars(module)
    if slot == "forward" and HOOK in own and HOOKED in own:
        return HOOKED
    return slot


def _is_ours(module: nn.Module, attribute: str, installed: InstalledSeams) -> bool:
    """Return True if ``attribute`` holds the function or view that was installed."""
    there = vars(module).get(attribute)
    return getattr(there, "__func__", there) is installed.ours


def _slot(module: nn.Module, name: str) -> str:
    """Return the slot for a seam on method ``name``.

    It is the method, or ``CONFIG`` if other code replaced the method.
    """
    installed = vars(module).get(SEAMS, {}).get(name)
    attribute = _attribute(module, name)
    if installed is not None:
        return name if _is_ours(module, attribute, installed) else CONFIG
    own = vars(module).get(attribute)
    function: Any = getattr(type(module), name) if own is None else getattr(own, "__func__", None)
    known = function is getattr(type(module), name) or hasattr(function, REPLACEMENT)
    return name if known and _within(function, _NOTHING) is not None else CONFIG


def _refresh(module: nn.Module, slot: str, installed: InstalledSeams) -> None:
    """Set the attribute of the instance to the function or view that uses the current seams.

    An attribute that other code has replaced since is kept, with a warning.
    """
    attribute: str | None = _attribute(module, slot)
    if installed.ours is not None:
        # accelerate's hooks move our function between ``forward`` and ``_old_forward``.
        places_of_ours = (slot, HOOKED) if slot == "forward" else (slot,)
        found = (place for place in places_of_ours if _is_ours(module, place, installed))
        attribute = next(found, None)
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
    """Return the methods that use a lookup, among ``forward`` and all that it calls on ``self``.

    The value is True for a method that looks up the attention function, False for one that only
    makes masks.
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
        name: any(isinstance(value, TABLES) for value in uses.values())
        for name, uses in names.items()
        if uses
    }


_MADE: dict[tuple, Callable | None] = {}


def _within(function: Callable, seam: Seam) -> Callable | None:
    """Return a copy of ``function`` whose lookups go through ``seam``; None if it cannot be copied.

    The copy is cached, since torch.compile guards on the identity of a function.
    """
    key = function, seam, functions_beside(function)
    if key not in _MADE:
        inner = inspect.unwrap(function)
        names = {name: _replaced(value, seam) for name, value in _uses(inner).items()}
        made = _MADE[key] = rebound(function, names, seam.label)
        if made is not None:
            setattr(made, REPLACEMENT, seam.label)
    return _MADE[key]


def _uses(function: FunctionType) -> dict[str, Any]:
    """Return the globals of ``function`` that a seam replaces, by name.

    These are tables of attention functions, functions that make causal masks, and functions of the
    same file that make masks.
    """
    uses = {}
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__globals__.get(
            "__file__"
        ) == function.__globals__.get("__file__"):
            inner = [value.__globals__.get(used) for used in names_in(value.__code__)]
        else:
            inner = []
        if isinstance(value, TABLES) or any(_makes_masks(creator) for creator in (value, *inner)):
            uses[name] = value
    return uses


def _makes_masks(value: Any) -> bool:
    """Return True for a transformers function that makes causal masks, or our wrapper of one."""
    known = isinstance(value, FunctionType) and value.__module__ == masking_utils.__name__
    return known and value.__name__ in CREATORS


CREATORS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)
"""Functions of ``transformers.masking_utils`` whose first argument is a configuration."""


def _replaced(value: Any, seam: Seam) -> Any:
    if isinstance(value, TABLES):
        return AttentionFunctions(value, seam)
    if not _makes_masks(value):
        return _within(value, seam) or value

    @functools.wraps(value)
    def create(*args: Any, **options: Any) -> Any:
        if args:
            return value(ConfigView(args[0], seam), *args[1:], **options)
        return value(**options | {"config": ConfigView(options["config"], seam)})

    return create
