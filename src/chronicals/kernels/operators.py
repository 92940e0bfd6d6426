"""Register kernels as operators of torch.

``torch.compile`` then sees one node, knows what it returns and writes, and does not break its
graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

OPERATOR_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""The Python function behind each registered operator."""


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an operator of torch.

    The operator has no derivative: it is called inside an ``autograd.Function`` whose backward pass
    calls operators, too. It takes its arguments by position.

    Args:
        name: ``chronicals::`` and the name of the operator.
        mutates: names of the tensor parameters that the function writes to. Their version counters
            are raised, as after any in-place operation.

    Returns:
        A decorator from the function to the operator. If the function returns tensors, register
        their shapes with ``torch.library.register_fake``.
    """

    def register(function: Callable[..., Any]) -> Any:
        # torch.library.custom_op wraps each call in autograd and checks: 36 µs of host time, where
        # a plain definition takes 2.5 µs.
        namespace, short = name.split("::")
        library = _library(namespace)
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        positions = [
            position
            for position, parameter in enumerate(inspect.signature(function).parameters)
            if parameter in mutates
        ]
        library.impl(
            short,
            _raising_versions(function, positions) if positions else function,
            "CompositeExplicitAutograd",
        )
        registered = getattr(getattr(torch.ops, namespace), short).default
        OPERATOR_FUNCTIONS[registered] = function
        if not registered._schema.returns:
            torch.library.register_fake(registered, lambda *args: None, lib=library)
        return registered

    return register


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


def _raising_versions(function: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Raise the version counters of the arguments at ``positions`` after each call."""

    @functools.wraps(function)
    def call_and_raise(*args: Any) -> Any:
        result = function(*args)
        for position in positions:
            # Inference tensors have no version counter.
            if not args[position].is_inference():
                torch.autograd.graph.increment_version(args[position])
        return result

    return call_and_raise
