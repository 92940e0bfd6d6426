"""The bytes that tensors on the CPU take, counted where they are made and freed."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracked(TorchDispatchMode):
    """Dispatch mode that counts the bytes of the tensors made in it that still exist.

    Args:
        there: tensors that were there before.

    Attributes:
        held: bytes now.
        peak: most bytes so far.
    """

    def __init__(self, there):
        super().__init__()
        self.held = 0
        self.peak = 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.held)
        return made

    def _count(self, storage):
        place = storage._cdata
        if place not in self.sizes:
            self.sizes[place] = storage.nbytes()
            self.held += storage.nbytes()
            weakref.finalize(storage, self._freed, place)

    def _freed(self, place):
        self.held -= self.sizes.pop(place)
