"""The largest absolute value (amax) of a tensor, passed from the kernel that writes the tensor to
the kernel that quantises it next, so that the quantising kernel need not read the tensor twice.

The writing kernel raises one int32 cell by an atomic maximum. The cell holds the bits of a
non-negative fp32, whose order as integers is their order as numbers. NaN is ignored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chronicals.kernels.launch import tl, triton


@triton.jit
def magnitude(x):
    """Return |x|, and 0 for NaN, so that a maximum ignores it."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def raise_amax(amax_ptr, most):
    """Raise the cell to the largest of ``most``, fp32 ``[n]``, at least 0."""
    bits = tl.max(most, 0).to(tl.int32, bitcast=True)
    # Most programs find the cell already higher and skip the atomic, the costly part.
    tl.atomic_max(amax_ptr, bits, mask=bits > tl.load(amax_ptr), sem="relaxed")


def new_amax(like: Tensor, wanted: bool = True) -> Tensor:
    """Return a cell for ``raise_amax``, int32 ``[1]`` at 0; ``absent`` if not ``wanted``."""
    return like.new_zeros(1, dtype=torch.int32) if wanted else absent(like)


def absent(like: Tensor) -> Tensor:
    """Return an empty tensor as placeholder for a result that an operator leaves out.

    A custom operator returns a fixed number of tensors.
    """
    return like.new_empty(0)


class _Measured(NamedTuple):
    """An amax with the tensor that it was measured on."""

    identity: tuple
    storage: StorageWeakRef
    amax: Tensor


class Amax:
    """A slot that carries one amax from the operation that writes a tensor to the one that
    quantises it.

    Both operations get the same ``Amax`` object. The first calls ``put`` with its output, the
    second ``take`` with its input. Between them autograd or a hook may have replaced or changed
    the tensor (it may have added another gradient), so the amax would be wrong. ``put`` therefore
    records which tensor was measured: address, shape, strides, dtype and version counter, and a
    weak reference to its storage, because a freed address can be given to another tensor.
    ``take`` returns the amax only if its tensor agrees in all of these and the storage still
    lives; otherwise it returns None, and the caller measures again. A slot is read once.
    """

    def __init__(self) -> None:
        self._measured: _Measured | None = None

    def put(self, x: Tensor, cell: Tensor) -> None:
        """Record ``cell``, int32 ``[1]`` from ``raise_amax``, as the amax of ``x``."""
        self._measured = _Measured(
            _identity(x), StorageWeakRef(x.untyped_storage()), cell.view(torch.float32)
        )

    def take(self, x: Tensor) -> Tensor | None:
        """Return the amax of ``x``, fp32 ``[1]``, and empty the slot; None if ``x`` is another
        tensor than was measured, or has changed since.
        """
        measured = self._measured
        self._measured = None
        if measured is None or measured.identity != _identity(x) or measured.storage.expired():
            return None
        return measured.amax


def with_amax(amax: Amax | None, x: Tensor, cell: Tensor) -> Tensor:
    """Return ``x``, after ``cell`` was recorded as its amax if the caller passed a slot."""
    if amax is not None:
        amax.put(x, cell)
    return x


def _identity(x: Tensor) -> tuple:
    """Return what changes if ``x`` is replaced or written; valid while its storage lives."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version
