"""A function of the caller that changes a model before its weights are read.

Its modules are there, on the meta device. What it replaces, transformers does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PREPARE: ContextVar[Callable[[Any], None] | None] = ContextVar("prepare", default=None)


@contextmanager
def preparing(change: Callable[[Any], None]) -> Iterator[None]:
    """A context in which models that are loaded are changed before their weights are read.

    Args:
        change: called with the model.
    """
    token = _PREPARE.set(change)
    try:
        yield
    finally:
        _PREPARE.reset(token)


def is_prepared() -> bool:
    """Return whether models are changed before their weights are read."""
    return _PREPARE.get() is not None


def prepare(model: Any) -> None:
    """Change a model whose weights are read next, if that is wanted."""
    change = _PREPARE.get()
    if change is not None:
        change(model)
