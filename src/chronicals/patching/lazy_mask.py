"""A mask that is not there until somebody looks: what a model hands to its layers where rows are documents.

Attention that takes documents reads them from it. Any other use makes the mask that transformers would have made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_sparse", "grad_fn", "is_leaf")
METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "get_device", "__len__")
LOOKED_AT: set[Any] = {getattr(Tensor, name).__get__ for name in ATTRIBUTES} | {getattr(Tensor, name) for name in METHODS}
"""What may be asked of a mask without making it."""


@dataclass(frozen=True)
class Padding:
    """Padding at the end of rows ``[B, S]``, of which P tokens are padding and no row has more than L of them.

    Attributes:
        places: of the padding among B · S, ``[P]``.
        within: of the same among the last L positions of every row, B · L, ``[P]``.
        longest: L.
        mask: makes the mask ``[B, 1, L, S]`` of the last L positions.
    """

    places: Tensor
    within: Tensor
    longest: int
    mask: Callable[[], Tensor]


@dataclass(frozen=True)
class Documents:
    """Rows ``[B, S]`` as documents.

    Attributes:
        bounds: int32 ``[N + 1]``, ending at T.
        longest: bound on a document's length.
        places: of the real tokens among B · S, or None where all are.
        window: of the sliding window, or None.
        padding: what is no real token, or None.
        mask: makes what transformers would have made, which may be None where a plain causal mask is meant.
        tensor: makes the same as a tensor.
    """

    bounds: Tensor
    longest: int
    places: Tensor | None
    window: int | None
    padding: Padding | None
    mask: Callable[[], Tensor | None]
    tensor: Callable[[], Tensor]


class LazyMask(Tensor):
    """The mask ``[B, 1, S, S]`` of ``documents``, made when somebody looks at its values."""

    documents: Documents

    @staticmethod
    def __new__(cls: type, documents: Documents, rows: int, length: int, dtype: torch.dtype) -> LazyMask:
        shape = (rows, 1, length, length)
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=documents.bounds.device)
        made.documents = documents
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKED_AT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if func is Tensor.detach:  # a checkpoint that is re-entered hands its inputs on so
            return args[0]
        return func(*_made(args), **_made(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_made(args), **_made(kwargs or {}))


def _made(given: Any) -> Any:
    return tree_map(lambda x: x.documents.tensor() if isinstance(x, LazyMask) else x, given)
