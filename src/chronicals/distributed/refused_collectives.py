"""A guard for work that one rank does by itself, such as a callback on rank 0.

The other ranks take no part in it. A collective in such work would block for ever, so the guard
makes it an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of torch operators that wait for other processes."""


@contextmanager
def refusing_collectives(
    modules: Collection[nn.Module], refusal: Callable[[str], Exception]
) -> Iterator[None]:
    """Context manager that makes collectives an error on this rank.

    A forward pass of one of ``modules``, whose weights are divided among ranks, raises before it
    begins. So does every operator of ``COLLECTIVES``.

    Args:
        modules: modules whose forward pass needs all ranks.
        refusal: makes the exception from a text that says what was called.
    """

    def refuse(module: nn.Module, _inputs: Any) -> None:
        if module in modules:
            raise refusal(f"called {type(module).__name__}")

    handle = register_module_forward_pre_hook(refuse)
    try:
        with _NoCollectives(refusal):
            yield
    finally:
        handle.remove()


class _NoCollectives(TorchDispatchMode):
    def __init__(self, refusal: Callable[[str], Exception]):
        super().__init__()
        self.refusal = refusal

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace in COLLECTIVES:
            raise self.refusal(
                f"asked all processes for something ({func.name().partition('::')[2]})"
            )
        return func(*args, **(kwargs or {}))
