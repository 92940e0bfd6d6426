"""The most bytes of tensors in host memory that live at a time while something runs."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Live(TorchDispatchMode):
    """Counts storages that operators make, from when they are returned until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        size = storage.nbytes()
        if not place or place in self.known:
            return
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def most_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """And what ``run`` returns."""
    with _Live() as live:
        made = run()
    return live.most, made
