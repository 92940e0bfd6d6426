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


@contextmanager
def preparing_by(method: str) -> Iterator[None]:
    """A context in which transformers' own quantizer of a method changes models, too.

    Args:
        method: ``quant_method`` of the checkpoints that it reads.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    usual: Any = AUTO_QUANTIZER_MAPPING[method]

    class Preparing(usual):
        def _process_model_before_weight_loading(self, model: Any, **named: Any) -> Any:
            prepare(model)
            return super()._process_model_before_weight_loading(model, **named)

    AUTO_QUANTIZER_MAPPING[method] = Preparing
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[method] = usual
