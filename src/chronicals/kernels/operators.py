"""Kernels as operators of torch: ``torch.compile`` sees one node, knows what it returns and
writes, and has no graph break.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

OPERATOR_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Of each operator what it does."""


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make an operator of a function; its arguments are given by position.

    ``torch.library.custom_op`` adds derivatives and checks, which are 36 µs of the host's time in
    each call, where this takes 2.5. The kernels need neither: they are called within an
    ``autograd.Function``, whose gradients are kernels, too.

    Args:
        name: ``chronicals::`` and what it is called.
        mutates: parameters, tensors, that it writes to; their versions count up, as after any
            operation in place.

    Returns:
        from the function to the operator, for which ``torch.library.register_fake`` says what it
        returns, if anything.
    """

    def made(function: Callable[..., Any]) -> Any:
        space, short = name.split("::")
        library = _library(space)
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        places = [
            place
            for place, given in enumerate(inspect.signature(function).parameters)
            if given in mutates
        ]
        library.impl(
            short, _counting(function, places) if places else function, "CompositeExplicitAutograd"
        )
        found = getattr(getattr(torch.ops, space), short).default
        OPERATOR_FUNCTIONS[found] = function
        if not found._schema.returns:
            torch.library.register_fake(found, lambda *given: None, lib=library)
        return found

    return made


@functools.cache
def _library(space: str) -> torch.library.Library:
    return torch.library.Library(space, "FRAGMENT")


def _counting(function: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*given: Any) -> Any:
        result = function(*given)
        for place in places:
            if not given[place].is_inference():
                torch.autograd.graph.increment_version(given[place])
        return result

    return counted
