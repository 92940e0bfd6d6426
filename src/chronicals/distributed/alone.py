"""What one process does while the others do something else must not need them: they would wait
for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional")
"""Libraries of operators that wait for other processes."""


@contextmanager
def alone(modules: Collection[nn.Module], refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Within: a forward pass of one of ``modules``, whose weights are divided among processes,
    raises before it begins, and so does any other collective.

    Args:
        refusal: makes the error of what was called.
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
