"""Copies of functions with some global names replaced, for use as methods of single instances.

A copy has the function's code object, a copy of its globals with the names replaced, and its
decorators. No source text is read, and no class or module is modified.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

REPLACEMENT = "chronicals_form"
"""Attribute of a function that replaces a method of an instance: the name of the replacement."""


def functions_beside(function: Callable) -> tuple:
    """Return the functions among the globals of ``function``, which other code may replace."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return tuple(value for value in names.values() if isinstance(value, FunctionType))


def names_in(code: CodeType) -> set[str]:
    """Return the global names and attributes that a code object uses.

    Comprehensions and inner functions are included.
    """
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*(names_in(part) for part in inner))


def rebound(function: Callable, names: Mapping[str, Any], label: str) -> Callable | None:
    """Return a copy of ``function`` in which the global ``names`` have these values.

    None if a decorator does not keep the decorated function in its closure.

    Args:
        function: a plain Python function, decorated or not.
        names: new values of globals by name.
        label: a name for these values. Calls with the same functions, names and label share the
            copied globals.
    """
    inner = inspect.unwrap(function)
    assert isinstance(inner, FunctionType)
    version = hash(functions_beside(inner))  # other code may replace a function later
    name = f"chronicals.{label}.{inner.__globals__['__name__']}.{'.'.join(sorted(names))}.{version}"
    # torch.compile looks up the globals of a function in a module of sys.modules.
    if name not in sys.modules:
        module = ModuleType(name)
        vars(module).update(inner.__globals__, __name__=name, **names)
        sys.modules[name] = module
    copied = _copied(inner, vars(sys.modules[name]), inner.__closure__)
    return _decorated_alike(function, copied)


def _decorated_alike(function: Any, made: Callable) -> Callable | None:
    """Apply the decorators of ``function`` to ``made``.

    None if a decorator does not keep the decorated function in its closure.
    """
    decorated = getattr(function, "__wrapped__", None)
    if decorated is None:
        return made
    inner = _decorated_alike(decorated, made)
    closure = getattr(function, "__closure__", None) or ()
    holds = [cell.cell_contents is decorated for cell in closure]
    if inner is None or not any(holds):
        return None
    cells = tuple(CellType(inner) if there else cell for cell, there in zip(closure, holds))
    return functools.update_wrapper(_copied(function, function.__globals__, cells), inner)


def _copied(
    function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a copy of the function with these globals and this closure."""
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__annotations__ = function.__annotations__
    return made
