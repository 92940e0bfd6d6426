"""The largest absolute value of a tensor (amax), found by the kernel that writes it, for the kernel
that quantises it next.

A kernel raises one cell, as the integer of the value's bits, which has the same order. NaN has no
part in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chronicals.kernels.launch import tl, triton


@triton.jit
def magnitude(x):
    """|x| for a maximum."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def raise_amax(amax_ptr, most):
    """The cell becomes at least the largest of ``most``, fp32 ``[n]``; a program that is below
    what it reads writes nothing.
    """
    bits = tl.max(most, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr, bits, mask=bits > tl.load(amax_ptr), sem="relaxed")


def new_amax(like: Tensor, wanted: bool = True) -> Tensor:
    """A cell for ``raise_amax``, int32 ``[1]``, at 0; ``absent`` where none is wanted."""
    return like.new_zeros(1, dtype=torch.int32) if wanted else absent(like)


def absent(like: Tensor) -> Tensor:
    """In the place of a result that an operator does not have this time: its results have
    places, not a number.
    """
    return like.new_empty(0)


class _Found(NamedTuple):
    """An amax, and by what the tensor that it is of is known."""

    identity: tuple
    storage: StorageWeakRef
    amax: Tensor


class Amax:
    """Handed to the operation that writes a tensor, which puts the amax, and to the one that
    quantises it, which takes it.

    It can be taken once, and only for the tensor that it was found for: where another gradient was
        added to it, or a hook
    changed it, there is none.
    """

    def __init__(self) -> None:
        self._found: _Found | None = None

    def put(self, x: Tensor, cell: Tensor) -> None:
        self._found = _Found(
            _identity(x), StorageWeakRef(x.untyped_storage()), cell.view(torch.float32)
        )

    def take(self, x: Tensor) -> Tensor | None:
        """fp32 ``[1]``."""
        found = self._found
        self._found = None
        if found is None or found.identity != _identity(x) or found.storage.expired():
            return None
        return found.amax


def with_amax(amax: Amax | None, x: Tensor, cell: Tensor) -> Tensor:
    """``x``, whose largest absolute value, found by a kernel in ``cell``, ``amax`` now knows, if
    anybody asked for it.
    """
    if amax is not None:
        amax.put(x, cell)
    return x


def _identity(x: Tensor) -> tuple:
    """Of a tensor whose memory is still its own."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version
