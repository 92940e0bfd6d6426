"""Work that one rank does by itself while the others wait or go on, such as a callback on rank 0.

``WorkEnded`` tells the others that it is done. ``refusing_collectives`` makes a collective in such
work an error: the other ranks take no part in it, so it would block for ever.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from chronicals.distributed.mesh import awaited

_numbers = itertools.count()
"""Counter for the keys; equal on all ranks, which create signals in the same order."""

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of torch operators that wait for other processes."""


class WorkEnded:
    """Signal over the store, without collectives, that work of rank 0 has ended.

    All ranks must create it, in their main threads; its methods may be called from other threads.
    """

    def __init__(self) -> None:
        self._key = f"chronicals/told/{next(_numbers)}"
        self._store = dist.distributed_c10d._get_default_store()

    def after(self, work: Callable[[], None]) -> None:
        """Run ``work`` on rank 0 and then signal, even if it raised."""
        try:
            work()
        finally:
            self._store.set(self._key, "yes")

    def wait(self) -> None:
        """Wait on another rank for the signal, or until the store is gone together with rank 0."""
        with contextlib.suppress(RuntimeError):
            awaited(self._store, self._key)


@contextlib.contextmanager
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
