"""A mask that is made when somebody reads it; a model passes it on if rows are documents.

Attention over documents reads their bounds from it. Any other use makes the mask that transformers
would have made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_METADATA_ATTRIBUTES = (
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
_METADATA_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "get_device",
    "__len__",
)
"""Names in ``Tensor`` that read its metadata, and no values."""

_METADATA_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel)
"""Functions that read metadata and are other objects than the methods of these names.

FSDP2 calls them to find what to cast.
"""


def metadata_readers(attributes: Iterable[str] = (), methods: Iterable[str] = ()) -> set[Any]:
    """Return the functions of ``__torch_function__`` that read metadata of a tensor.

    Args:
        attributes: names of further attributes of ``Tensor``.
        methods: names of further methods.
    """
    return {
        *(getattr(Tensor, name).__get__ for name in (*_METADATA_ATTRIBUTES, *attributes)),
        *(getattr(Tensor, name) for name in (*_METADATA_METHODS, *methods)),
        *_METADATA_FUNCTIONS,
    }


_WITHOUT_VALUES = metadata_readers()


@dataclass(frozen=True)
class RowPadding:
    """Padding at the end of rows ``[B, S]``: P tokens, of which no row has more than L.

    Attributes:
        places: indices of the padding in B · S, ``[P]``.
        within: indices of the same tokens in R · L, the last L positions of the rows that have
            padding, ``[P]``.
        rows: indices of the rows that have padding, ``[R]``.
        longest: L.
        mask: makes the mask ``[R, 1, L, S]`` of the last L positions of these rows.
    """

    places: Tensor
    within: Tensor
    rows: Tensor
    longest: int
    mask: Callable[[], Tensor]


@dataclass(frozen=True)
class RowDocuments:
    """Rows ``[B, S]`` as documents.

    Attributes:
        bounds: int32 ``[N + 1]``, ending at T.
        longest: upper bound of a document's length.
        places: indices of the real tokens in B · S, or None if all tokens are real.
        window: width of the sliding window, or None.
        padding: the padding, or None if there is none.
        mask: makes the mask of transformers, which may be None for a plain causal mask.
        tensor: makes the same mask, always as a tensor.
    """

    bounds: Tensor
    longest: int
    places: Tensor | None
    window: int | None
    padding: RowPadding | None
    mask: Callable[[], Tensor | None]
    tensor: Callable[[], Tensor]

    def cast(self, dtype: torch.dtype) -> RowDocuments:
        """Return the documents with masks in another dtype."""
        padding = self.padding
        if padding is not None:
            mask = functools.cache(functools.partial(_cast, padding.mask, dtype))
            padding = replace(padding, mask=mask)
        makers: Any = (
            functools.cache(functools.partial(_cast, make, dtype))
            for make in (self.mask, self.tensor)
        )
        mask, tensor = makers
        return replace(self, padding=padding, mask=mask, tensor=tensor)


def _cast(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    """Return the mask of ``make`` in ``dtype``; None if it makes none."""
    mask = make()
    return None if mask is None else mask.to(dtype)


class LazyMask(Tensor):
    """The mask ``[B, 1, S, S]`` of ``documents``, made when somebody reads its values."""

    documents: RowDocuments

    @staticmethod
    def __new__(
        cls: type, documents: RowDocuments, rows: int, length: int, dtype: torch.dtype
    ) -> LazyMask:
        """Return a tensor without memory, of the mask's shape and dtype."""
        shape = (rows, 1, length, length)
        mask: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=documents.bounds.device
        )
        mask.documents = documents
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if func is Tensor.detach:  # a re-entrant checkpoint detaches its inputs
            return args[0]
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
            mask, dtype = args
            if mask.dtype == dtype:
                return mask
            return LazyMask(mask.documents.cast(dtype), mask.shape[0], mask.shape[-1], dtype)
        return func(*_made(args), **_made(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_made(args), **_made(kwargs or {}))


def _made(arguments: Any) -> Any:
    """Return the arguments of a call with every lazy mask made."""
    return tree_map(lambda x: x.documents.tensor() if isinstance(x, LazyMask) else x, arguments)
