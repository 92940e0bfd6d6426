"""The shapes of tensors that operations make."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations make, in the forward and the backward pass."""

    def __init__(self):
        super().__init__()
        self.seen: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen += [x.shape for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out
