"""A mask that is not there until somebody looks: what a model hands to its layers where rows are
documents.

Attention that takes documents reads them from it. Any other use makes the mask that transformers
would have made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_sparse",
    "grad_fn",
    "is_leaf",
)
METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "get_device",
    "__len__",
)
FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel)
"""Functions of torch that are other objects than the methods; FSDP2 asks by them what it is to
cast.
"""

LOOKED_AT: set[Any] = {getattr(Tensor, name).__get__ for name in ATTRIBUTES}.union(
    (getattr(Tensor, name) for name in METHODS), FUNCTIONS
)
"""What may be asked of a mask without making it."""


@dataclass(frozen=True)
class Padding:
    """Padding at the end of rows ``[B, S]``, of which P tokens are padding and no row has more than
    L of them.

    Attributes:
        places: of the padding among B · S, ``[P]``.
        within: of the same among the last L positions of the rows that have padding, R · L,
            ``[P]``.
        rows: that have padding, ``[R]``.
        longest: L.
        mask: makes the mask ``[R, 1, L, S]`` of the last L positions of these rows.
    """

    places: Tensor
    within: Tensor
    rows: Tensor
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
        mask: makes what transformers would have made, which may be None where a plain causal mask
            is meant.
        tensor: makes the same as a tensor.
    """

    bounds: Tensor
    longest: int
    places: Tensor | None
    window: int | None
    padding: Padding | None
    mask: Callable[[], Tensor | None]
    tensor: Callable[[], Tensor]

    def cast(self, dtype: torch.dtype) -> Documents:
        """Their masks in another dtype."""
        padding = self.padding and replace(self.padding, mask=_cast(self.padding.mask, dtype))
        return replace(
            self, padding=padding, mask=_cast(self.mask, dtype), tensor=_cast(self.tensor, dtype)
        )


def _cast(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    """What ``make`` makes, in ``dtype``, made once."""

    @functools.cache
    def cast() -> Tensor | None:
        made = make()
        return None if made is None else made.to(dtype)

    return cast


class LazyMask(Tensor):
    """The mask ``[B, 1, S, S]`` of ``documents``, made when somebody looks at its values."""

    documents: Documents

    @staticmethod
    def __new__(
        cls: type, documents: Documents, rows: int, length: int, dtype: torch.dtype
    ) -> LazyMask:
        shape = (rows, 1, length, length)
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=documents.bounds.device
        )
        made.documents = documents
        return made

    def cast(self, dtype: torch.dtype) -> LazyMask:
        """The same mask in another dtype, not made either."""
        if self.dtype == dtype:
            return self
        return LazyMask(self.documents.cast(dtype), self.shape[0], self.shape[-1], dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKED_AT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if func is Tensor.detach:  # a checkpoint that is re-entered hands its inputs on so
            return args[0]
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
            return args[0].cast(args[1])
        return func(*_made(args), **_made(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_made(args), **_made(kwargs or {}))


def _made(given: Any) -> Any:
    return tree_map(lambda x: x.documents.tensor() if isinstance(x, LazyMask) else x, given)
